"""Recognises forward definitions of Transformers whose meaning is known, so that a faster part may take their place.

That two parts agree on some tokens proves nothing about branches that those tokens do not take: a clip that no value
reaches, a scale that begins beyond some position. So a part is replaced only if the definition of its `forward` is one
that was read. It is known by a hash of its source in a canonical form: without annotations, docstrings and the handling
of a key-value cache, which is never passed here, and with every function and every method of its class that it names.
Transformers writes one definition into many families, so a few hashes cover most of them; they are the same for 5.17
and 5.24.

    python -m batchjob.engine.model.known_forwards

prints the definitions of the installed Transformers, what each is known as, and the classes that have it: what to look
at when a new version changes them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

_CACHE_NAMES = frozenset({"cache", "past_key_values", "past_key_value"})
_OTHER_ATTENTION = "eager_attention_forward"  # named beside our attention function and never called
# They rename arguments, or let kernels of the hub replace `forward` on instances.
_NEUTRAL_DECORATORS = frozenset({"deprecate_kwarg", "use_kernel_forward_from_hub", "use_kernelized_func"})


class Form(NamedTuple):
    """The name of a definition's meaning. It applies to the modules for which `holds` is true: the branches of
    some depend on settings."""

    name: str
    holds: Callable[[Any], bool] = lambda module: True


_ATTENTION = Form("attention")  # q, k and v projections, norms per head or none, rotary embedding of whole heads
_PRE_NORM = Form("pre_norm_layer")
_RMS_NORM = Form("rms_norm")
FORMS: dict[str, Form] = {
    "2479104ec7c3eb26": _RMS_NORM,  # Llama and most others
    "6e5ee3cc4d8d6850": _RMS_NORM,  # OLMo 2, gpt-oss: rounds once more at the end
    "e90e51b5922854f0": _RMS_NORM,  # Helium: likewise
    "d897e3c4d14c5306": _RMS_NORM,  # Moshi
    "8b003d2db8267885": _RMS_NORM,  # Llama 4
    "0bc78e55cda8c622": Form("offset_rms_norm"),  # Gemma: the weight is stored less one
    "5bb32e6cf553e9f8": _ATTENTION,  # Llama, Gemma, Granite, Qwen2-MoE
    "e21984f499ae4cff": _ATTENTION,  # Qwen2, Ministral
    "e6ab85ba8ab6aa55": _ATTENTION,  # Mistral, Mixtral
    "3f71fccca969b0bf": _ATTENTION,  # Qwen3, Qwen3-MoE
    "c404fe6655d300c6": _ATTENTION,  # Apertus, HunYuan 3
    "133d9af898021a0b": _ATTENTION,  # Gemma 2
    "a362b4b8888cf374": _ATTENTION,  # Gemma 3
    "f1022c434a5165ad": _ATTENTION,  # Seed-OSS: with a dropout, which does nothing outside of training
    "20c118e06a443cd7": _ATTENTION,  # StarCoder 2: likewise
    "2aaeca6ab2ae17b6": Form("attention", lambda part: bool(part.use_rope)),  # SmolLM3
    "2468a31e6e2c1b27": Form("attention", lambda part: part.config.clip_qkv is None),  # OLMo
    "24a74734b5c0d623": Form(
        "attention", lambda part: part.sliding_window is None or bool(part.is_sliding)
    ),  # EXAONE 4
    # GLM-4-MoE: rotary embedding of the first dimensions
    "f300acd988106e60": Form("merged_attention", lambda part: bool(part.use_qk_norm) == hasattr(part, "q_norm")),
    "f512077129b64ee3": Form("merged_attention"),  # Phi-3: one projection, rotary embedding of the first dimensions
    "ff39390469a48fac": Form("half_angle_attention"),  # gpt-oss
    "3c9bbe5963be77b3": Form("scaled_attention"),  # Ministral 3: queries are scaled by their position
    "6fffcfbd1c43fe7f": Form("scaled_attention"),  # the same in Transformers 5.17
    "f537b0e0fd01cec4": Form("gated_mlp"),  # Llama and most others
    "a9b1646ee1024286": Form("gated_mlp"),  # Seed-OSS: with a dropout
    "4be359c7b1272b5d": Form("merged_gated_mlp"),  # Phi-3, GLM
    "a43ab638788bf9ec": _PRE_NORM,  # Llama and most others
    "96c1139eb0c18549": _PRE_NORM,  # Mixtral
    "0971ddf963ba7796": _PRE_NORM,  # gpt-oss: experts that return a pair
    "ed4433e191a71eb6": Form(  # Phi-3: with dropouts
        "pre_norm_layer", lambda part: type(part.resid_attn_dropout) is type(part.resid_mlp_dropout) is nn.Dropout
    ),
    "8b05430f58879669": Form("sandwich_layer"),  # Gemma 2 and 3
}
# Class -> activation, by the formula of each. Others that are close (gelu_10 clips, quick_gelu) are not these.
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


def known_form(module: nn.Module) -> str | None:
    """The name of the form that the module's forward has, or None if it is not known."""
    if module.training or not is_plain(module):
        return None
    if type(module) is nn.RMSNorm:
        return _RMS_NORM.name if module.eps is not None else None
    kind: Any = type(module)
    form = FORMS.get(definition(kind) or "")
    try:
        return form.name if form is not None and form.holds(module) else None
    except AttributeError:
        return None


def is_plain(module: nn.Module) -> bool:
    """True where calling a module runs its class's `forward` and nothing more: no hook, and no other in its place."""
    call: Any = type(module).__call__
    is_own = call is nn.Module.__call__ or call.__module__ == "transformers.modeling_layers"  # gradient checkpoints
    return is_own and "forward" not in vars(module) and not (module._forward_hooks or module._forward_pre_hooks)


def known_activation(module: Any) -> str | None:
    """ "silu", "gelu" or "gelu_tanh" for an activation module of PyTorch or Transformers, or None for any other."""
    kind = type(module)
    if kind is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    is_theirs = kind.__module__ in ("transformers.activations", "torch.nn.modules.activation")
    return _ACTIVATIONS.get(kind.__name__) if is_theirs else None


@functools.cache
def definition(kind: type) -> str | None:
    """The hash of a module class's forward, or None where its source cannot be had."""
    try:
        text = "\n".join(_texts(kind.forward, kind, {"forward"}))  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _texts(function: Any, kind: type, seen: set[str]) -> Iterator[str]:
    """The canonical text of a function, then name and texts of the functions and methods of `kind` that it names."""
    function = _unwrapped(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree = ast.fix_missing_locations(_Canonical().visit(tree))
    yield ast.unparse(tree)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {_OTHER_ATTENTION}
    for name in sorted(names - seen):
        helper = function.__globals__.get(name)
        if inspect.isfunction(helper):
            seen.add(name)
            yield f"{name}:"
            yield from _texts(helper, kind, seen)
    methods = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    for name in sorted(methods - seen):
        method = inspect.getattr_static(kind, name, None)
        method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
        if inspect.isfunction(method):
            seen.add(name)
            yield f"self.{name}:"
            yield from _texts(method, kind, seen)


def _unwrapped(function: Any) -> Any:
    """The function below Transformers' own wrappers. Raises ValueError for a wrapper of another package."""
    import transformers

    root = str(Path(transformers.__file__).parent)
    while hasattr(function, "__wrapped__"):
        if not function.__code__.co_filename.startswith(root):
            raise ValueError("wrapped by something else")
        function = function.__wrapped__
    return function


class _Canonical(ast.NodeTransformer):
    """Takes out what has no effect on the result of a packed step, in place."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        test = node.test
        is_about_cache = (
            isinstance(test, ast.Compare)
            and isinstance(test.left, ast.Name)
            and test.left.id in _CACHE_NAMES
            and isinstance(test.ops[0], ast.IsNot)
            and ast.unparse(test.comparators[0]) == "None"
            and not node.orelse
        )
        return None if is_about_cache else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in _CACHE_NAMES]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        first, arguments = node.body[0], node.args
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:] or [ast.Pass()]
        node.name, node.returns = "_", None
        node.decorator_list = [item for item in node.decorator_list if _name_of(item) not in _NEUTRAL_DECORATORS]
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.kwarg):
            if argument is not None:
                argument.annotation = None
        padded = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
        kept = [pair for pair in zip(arguments.args, padded, strict=True) if pair[0].arg not in _CACHE_NAMES]
        if kept and kept[0][0].arg == "self":  # called by keywords: neither order nor defaults matter
            kept = sorted(((argument, None) for argument, _ in kept), key=lambda pair: pair[0].arg)
        arguments.args = [argument for argument, _ in kept]
        arguments.defaults = [default for _, default in kept if default is not None]
        return self.generic_visit(node)


def _name_of(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _classes() -> Iterator[type[nn.Module]]:
    """The parts of decoder layers in the modeling files of all causal language models."""
    from transformers import AutoModelForCausalLM

    files = {sys.modules[model.__module__] for model in AutoModelForCausalLM._model_mapping.values()}
    for file in sorted(files, key=lambda module: module.__name__):
        for name, kind in sorted(vars(file).items()):
            is_part = name.endswith(("RMSNorm", "Attention", "MLP", "DecoderLayer"))
            if is_part and isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == file.__name__:
                yield kind


def main() -> None:
    classes: dict[str, list[str]] = {}
    for kind in _classes():
        classes.setdefault(definition(kind) or "no source", []).append(kind.__name__)  # type: ignore[arg-type]
    for found, names in sorted(classes.items(), key=lambda item: (item[0] not in FORMS, -len(item[1]))):
        print(f"{FORMS[found].name if found in FORMS else '-':20} {found}  {', '.join(names)}")


if __name__ == "__main__":
    main()
