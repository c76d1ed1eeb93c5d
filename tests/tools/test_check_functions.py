import ast
from pathlib import Path

import pytest

import check_functions


def function(source: str) -> check_functions.Function:
    node = ast.parse(source).body[0]
    assert isinstance(node, check_functions.Function)
    return node


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f():\n    return 1\n", 2),
        ('def f():\n    """One line."""\n    return 1\n', 2),
        ('def f():\n    """Two\n    lines."""\n    return 1\n', 2),
        ("async def f(\n    a,\n    b,\n):\n    return a\n", 5),
        ("@wrap\ndef f():\n    return 1\n", 2),
    ],
)
def test_counts_signature_and_body_but_no_docstring(source: str, lines: int) -> None:
    assert check_functions.lines_of(function(source)) == lines


def write(folder: Path, body_lines: int) -> Path:
    path = folder / "module.py"
    path.write_text("class C:\n    def long(self):\n" + "        pass\n" * body_lines, encoding="utf-8")
    return path


def test_limit_is_inclusive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, check_functions.LIMIT - 1)
    assert check_functions.main([str(tmp_path)]) == 0
    path = write(tmp_path, check_functions.LIMIT)
    assert check_functions.main([str(tmp_path)]) == 1
    assert f"{path}:2: long has 71 lines" in capsys.readouterr().out


def test_missing_path_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_functions.main([str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
    assert check_functions.main([]) == 2
