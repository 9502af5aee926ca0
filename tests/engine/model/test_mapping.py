"""The outcomes that docs/models.md lists are those of the differential test over all model types."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mapping import DOCS, TYPES, outcome, quiet

LISTED = {
    name: result
    for result, names in re.findall(r"^\| (equal|refused|not built) \| (.*?) \|", DOCS.read_text(), re.MULTILINE)
    for name in names.split(", ")
}


def test_every_model_type_is_listed() -> None:
    assert set(TYPES) - set(LISTED) == set()


@pytest.mark.long
@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_type_is_equal_to_transformers_or_refused(model_type: str) -> None:
    quiet()
    actual = outcome(model_type)
    assert actual.result == LISTED[model_type], actual
    assert actual.result != "equal" or actual.num_preempted
