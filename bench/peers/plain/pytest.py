"""What our tests use of pytest, for machines where nothing can be installed.

`cargo xtask bench gpu` puts this folder on PYTHONPATH where there is no pytest; `python -m pytest FILE ...` then
runs the tests of these files one after the other. Marks: skip, skipif, parametrize, also as `pytestmark`. Also
raises, skip, importorskip, approx, plain fixtures and tmp_path. Anything else is an AttributeError, not a passed test.
"""

import importlib
import inspect
import itertools
import math
import pathlib
import re
import sys
import tempfile
import time
import traceback


class _Skipped(Exception):
    pass


class _Mark:
    def __init__(self, apply):
        self._apply = apply

    def __call__(self, function):
        self._apply(function)
        return function


class _Marks:
    def skip(self, reason=""):
        return self.skipif(True, reason=reason)

    def skipif(self, condition, *, reason=""):
        return _Mark(lambda function: condition and _list(function, "_skips").append(reason))

    def parametrize(self, names, values):
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(names, value if len(names) > 1 else (value,))) for value in values]
        return _Mark(lambda function: _list(function, "_rows").append(rows))


mark = _Marks()


def fixture(function):
    """A function whose value tests get by its name. One that yields is closed after the test."""
    function._is_fixture = True
    return function


def skip(reason=""):
    raise _Skipped(reason)


def importorskip(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        raise _Skipped(f"no {name}") from None


class raises:
    """Requires that its body raises; the error is then ``value``."""

    def __init__(self, expected, match=None):
        self.expected, self.match, self.value = expected, match, None

    def __enter__(self):
        return self

    def __exit__(self, kind, value, _):
        assert kind is not None, f"nothing was raised, expected {self.expected}"
        if not issubclass(kind, self.expected):
            return False
        self.value = value
        assert self.match is None or re.search(self.match, str(value)), f"{self.match!r} does not match {value!s}"
        return True


class approx:
    """Equal to numbers that are close."""

    def __init__(self, expected, rel=1e-6, abs=1e-12):
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, other):
        return math.isclose(other, self.expected, rel_tol=self.rel, abs_tol=self.abs)


def _list(function, name):
    if not hasattr(function, name):
        setattr(function, name, [])
    return getattr(function, name)


def _cases(function):
    """Every way a test is to be called."""
    for rows in itertools.product(*getattr(function, "_rows", [])):
        yield {name: value for row in rows for name, value in row.items()}


def _call(function, given, module, stack):
    """Calls a test or a fixture with what it asks for by name."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given:
            arguments[name] = given[name]
        elif name == "tmp_path":
            folder = tempfile.TemporaryDirectory()
            stack.append(folder.cleanup)
            arguments[name] = pathlib.Path(folder.name)
        elif hasattr(getattr(module, name, None), "_is_fixture"):
            arguments[name] = _call(getattr(module, name), given, module, stack)
        elif parameter.default is inspect.Parameter.empty:
            raise TypeError(f"{function.__name__} asks for {name!r}, which only the real pytest knows")
    value = function(**arguments)
    if inspect.isgenerator(value):
        stack.append(lambda rest=value: next(rest, None))
        return next(value)
    return value


def _run(function, given, module):
    stack = []
    try:
        reasons = getattr(function, "_skips", [])
        if reasons:
            raise _Skipped(reasons[0])
        _call(function, given, module, stack)
    finally:
        while stack:
            stack.pop()()


def main(files):
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    start = time.monotonic()
    for file in map(pathlib.Path, files):
        sys.path.insert(0, str(file.parent.resolve()))
        module = importlib.import_module(file.stem)
        marks = getattr(module, "pytestmark", [])
        for name, function in list(vars(module).items()):
            if not (name.startswith("test_") and inspect.isfunction(function)):
                continue
            for each in marks if isinstance(marks, list) else [marks]:
                each(function)
            for given in _cases(function):
                case = f"{file}::{name}" + (f"[{'-'.join(map(str, given.values()))}]" if given else "")
                try:
                    _run(function, given, module)
                except _Skipped as reason:
                    counts["skipped"] += 1
                    print(f"SKIPPED {case}: {reason}", flush=True)
                except Exception:
                    counts["failed"] += 1
                    print(f"FAILED {case}\n{traceback.format_exc()}", flush=True)
                else:
                    counts["passed"] += 1
                    print(f"PASSED {case}", flush=True)
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    print(f"{told or 'no tests'} in {time.monotonic() - start:.1f}s (without pytest)")
    return 1 if counts["failed"] or not sum(counts.values()) else 0


if __name__ == "__main__":
    # Test files import this module by its name, and must find the classes of this very one.
    sys.modules["pytest"] = sys.modules["__main__"]
    sys.exit(main([word for word in sys.argv[1:] if not word.startswith("-")]))
