import shutil
from pathlib import Path

import pytest

import check_ownership

SOURCE = Path(__file__).parents[2] / "src"

BREAKS = {
    "import of a request": ("core/outputs.py", "from starlette.requests import Request\n"),
    "module import": ("wire/family.py", "import uvicorn.protocols.http.httptools_impl\n"),
    "parameter": ("core/engine.py", 'def leak(response: "Response") -> None: ...\n'),
    "result": ("wire/family.py", "def leak() -> HandlerRequest | None: ...\n"),
    "attribute": ("core/request.py", "class Leak:\n    transport: asyncio.Transport\n"),
    "inside a string annotation": ("core/request.py", "class Leak:\n    held: 'list[StreamWriter]'\n"),
    "nested generic": ("core/request.py", "def leak(writers: dict[str, list[asyncio.WriteTransport]]) -> None: ...\n"),
    "alias": ("core/request.py", "Line = asyncio.Transport | None\n"),
    "our own connection": ("serve/jobs.py", "class Leak:\n    line: ClientLine\n"),
    "stream module": ("serve/streams.py", "def leak(cycle: RequestResponseCycle) -> None: ...\n"),
    "handlers": ("serve/streams.py", "from windtunnel.serve.generate import GenerateRoute\n"),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(SOURCE / "windtunnel", tmp_path / "windtunnel", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_source_holds_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_ownership.main([str(SOURCE)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_copy_fails(name: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, leak = BREAKS[name]
    path = copy / "windtunnel" / file
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(f"{before}\n{leak}", encoding="utf-8")
    assert check_ownership.main([str(copy)]) == 1
    assert str(path) in capsys.readouterr().out


def test_a_room_outside_the_contract_may_name_them(copy: Path) -> None:
    (copy / "windtunnel" / "serve" / "http11.py").write_text("from starlette.requests import Request\n", encoding="utf-8")
    assert check_ownership.main([str(copy)]) == 0


def test_our_own_engine_request_is_allowed(copy: Path) -> None:
    (copy / "windtunnel" / "core" / "more.py").write_text("def f(request: EngineRequest) -> None: ...\n", encoding="utf-8")
    assert check_ownership.main([str(copy)]) == 0


def test_wrong_folder_is_a_usage_error(tmp_path: Path) -> None:
    assert check_ownership.main([str(tmp_path)]) == 2
