"""Every example learns with two workers, and only the first of them speaks."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
from cluster import run

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/pytorch"


def example(script, words):
    """What an example prints."""
    sys.argv = [script, *words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize(
    "script, words, workers",
    [
        ("mnist_cnn.py", ["--epochs", "2", "--steps", "12"], 1),
        ("mnist_cnn.py", ["--epochs", "2", "--steps", "12"], 2),
        ("cifar_vgg.py", ["--epochs", "2", "--steps", "6", "--batch", "8", "--plan"], 2),
        ("char_transformer.py", ["--steps", "40", "--batch", "4", "--accumulate", "2"], 2),
    ],
)
def test_examples_learn_and_only_rank_0_speaks(script, words, workers):
    first, *others = run(example, workers, script=script, words=words)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", first)]
    assert len(losses) == 2 and losses[1] < losses[0], first
    assert others == [""] * (workers - 1)
    if "--plan" in words:
        assert "classifier.1.weight" in first, first
