"""Recognises forward definitions of Transformers whose meaning is known, so that a faster part may take their place.

That two parts agree on some tokens proves nothing about branches that those tokens do not take: a clip that no value
reaches, a scale that begins beyond some position. So a part is replaced only if the definition of its `forward` is one
that was read. It is known by a hash of its source in a canonical form: without annotations, docstrings, decorators and
the handling of a key-value cache, which is never passed here, and with every function of its module and method of its
class that it names. Transformers writes one definition into many families, so a few hashes cover most of them; they
are the same for 5.17 and 5.24.

    python -m batchjob.engine.known_forwards llama qwen3 olmo

prints the classes of these families and what each is known as: what to look at when a new version changes them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

_CACHE_NAMES = {"cache", "past_key_values", "past_key_value"}
_OTHER_ATTENTION = "eager_attention_forward"  # named beside our attention function and never called


class Form(NamedTuple):
    """What a definition computes, and when: `holds` says so for a module whose branches depend on its settings."""

    name: str
    holds: Callable[[Any], bool] = lambda module: True


_ATTENTION = Form("attention")  # q, k and v projections, norms per head or none, rotary embedding of whole heads
_PRE_NORM = Form("pre_norm_layer")
_RMS_NORM = Form("rms_norm")
FORMS: dict[str, Form] = {
    "e8d04ee07dbf": _ATTENTION,  # Llama, Gemma, Granite, Qwen2-MoE
    "a93340ac8764": _ATTENTION,  # Qwen2, Ministral
    "a51144293962": _ATTENTION,  # Qwen3, Qwen3-MoE
    "ffd394d0c396": _ATTENTION,  # Mistral, Mixtral
    "934fab8de194": _ATTENTION,  # Gemma 2
    "1eb9e049bd38": _ATTENTION,  # Gemma 3
    "3ecb54f8a205": _ATTENTION,  # Seed-OSS: with a dropout, which does nothing outside of training
    "7365aa2fa476": _ATTENTION,  # StarCoder 2: likewise
    "2527619da08e": Form("attention", lambda part: bool(part.use_rope)),  # SmolLM3
    "ef550b45a842": Form("attention", lambda part: part.config.clip_qkv is None),  # OLMo
    "5c6f4b5a106e": Form("merged_attention"),  # Phi-3: one projection, rotary embedding of the first dimensions
    "6b2454aa9815": Form("half_angle_attention"),  # gpt-oss
    "4a9e0f851f1a": Form("gated_mlp"),  # Llama and most others
    "bd5992fd8950": Form("gated_mlp"),  # Qwen2
    "f4f5cc3cbf4a": Form("merged_gated_mlp"),  # Phi-3, GLM
    "2e59efe95696": _RMS_NORM,  # Llama and most others
    "11c9d25f89e2": _RMS_NORM,  # OLMo 2, gpt-oss: rounds once more at the end
    "83427fbd6ca5": Form("offset_rms_norm"),  # Gemma: the weight is stored less one
    "d6e809ce1884": _PRE_NORM,  # Llama and most others
    "b78a590fa219": _PRE_NORM,  # Mixtral
    "a91f68d8becd": _PRE_NORM,  # Phi-3: with dropouts
    "25e6733e4c6c": _PRE_NORM,  # gpt-oss: experts that return a pair
    "071d511d3ac8": Form("sandwich_layer"),  # Gemma 2 and 3
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
    if "forward" in vars(module):
        return None  # somebody has put another one in
    if type(module) is nn.RMSNorm:
        return _RMS_NORM.name if module.eps is not None else None
    kind: Any = type(module)
    form = FORMS.get(definition(kind) or "")
    try:
        return form.name if form is not None and form.holds(module) else None
    except AttributeError:
        return None


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
        text = "\n".join(_texts(kind.forward, kind, set()))  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _texts(function: Any, kind: type | None, seen: set[str]) -> Iterator[str]:
    """The canonical text of a function, then name and texts of what it names of its module and of its class."""
    function = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    yield ast.unparse(ast.fix_missing_locations(_Canonical().visit(tree)))
    for name in sorted(names - seen - {_OTHER_ATTENTION}):
        found = inspect.unwrap(function.__globals__.get(name)) if callable(function.__globals__.get(name)) else None
        if inspect.isfunction(found) and found.__module__ == function.__module__:
            seen.add(name)
            yield name
            yield from _texts(found, None, seen)
    if kind is not None:
        for name in sorted(own):
            method = inspect.getattr_static(kind, name, None)
            if inspect.isfunction(method):
                yield name
                yield from _texts(method, None, set())


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


class _Canonical(ast.NodeTransformer):
    """Takes out what has no effect on the result, in place."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns, node.decorator_list, node.name = None, [], "f"
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        self.generic_visit(node)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = sorted(argument.arg for argument in arguments if argument.arg not in _CACHE_NAMES)
        node.args = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
        return node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """`if cache is not None:` without an else."""
        test = node.test
        if (
            isinstance(test, ast.Compare)
            and isinstance(test.left, ast.Name)
            and test.left.id in _CACHE_NAMES
            and isinstance(test.ops[0], ast.IsNot)
            and not node.orelse
        ):
            return None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in _CACHE_NAMES]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return None if node.value is None else ast.Assign([node.target], node.value)


def main() -> None:
    from importlib import import_module

    for family in sys.argv[1:]:
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__:
                found = definition(kind)  # type: ignore[arg-type]
                form = FORMS.get(found or "")
                print(f"{name:40} {found} {form.name if form else '-'}")


if __name__ == "__main__":
    main()
