from pathlib import Path

import pytest

import check_docs

KNOWN = frozenset({"serve", "demo"})


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_good_links_pass(tmp_path: Path) -> None:
    write(tmp_path, "docs/model.md", "# Model\n\n## What `core` may not know\n\n## Twice\n\n## Twice\n")
    page = write(
        tmp_path,
        "README.md",
        "# Title here\n"
        "[a](docs/model.md) [b](docs/model.md#what-core-may-not-know) [c](#title-here) [d](docs/model.md#twice-1)\n"
        "[e](https://example.org/x#y) [f](mailto:a@b.c) `[g](nowhere.md)`\n```\n[h](nowhere.md)\n```\n",
    )
    assert list(check_docs.broken_links(page)) == []


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("gone.md", "no such file"),
        ("#gone", "no such heading"),
        ("docs/model.md#gone", "no such heading"),
        ("docs/model.md#not-a-heading", "no such heading"),
    ],
)
def test_broken_links_are_named(tmp_path: Path, link: str, reason: str) -> None:
    write(tmp_path, "docs/model.md", "# Model\n```\n# Not a heading\n```\n")
    page = write(tmp_path, "README.md", f"# Title\n\nSee [this]({link}).\n")
    [fault] = check_docs.broken_links(page)
    assert (fault.line, reason in fault.what, link in fault.what) == (3, True, True)


def test_commands_in_fences_must_exist(tmp_path: Path) -> None:
    page = write(
        tmp_path, "README.md", "$ windtunnel prose\n```console\n$ windtunnel serve --x\n$ windtunnel gone\n$ ls\n```\n"
    )
    [fault] = check_docs.unknown_commands(page, KNOWN)
    assert fault.line == 4
    assert "windtunnel gone" in fault.what


def test_a_tilde_inside_a_fence_does_not_close_it(tmp_path: Path) -> None:
    page = write(tmp_path, "README.md", "```\n~~~\n$ windtunnel gone\n```\n")
    assert len(list(check_docs.unknown_commands(page, KNOWN))) == 1


def test_the_repository_s_documents_are_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_docs.main([str(Path(__file__).parents[2])]) == 0, capsys.readouterr().out


def test_main_reports_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "README.md", "[x](gone.md)\n")
    assert check_docs.main([str(tmp_path)]) == 1
    assert "README.md:1: gone.md: no such file" in capsys.readouterr().out
    assert check_docs.main([str(tmp_path / "absent")]) == 2
