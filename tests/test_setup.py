"""What a newcomer and CI meet first: the interpreter that is found, and tests that say what they lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _make_venv(folder: Path, *candidates: Path | str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(ROOT / ".ci" / "make-venv"), str(folder), " ".join(map(str, candidates))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _interpreter(path: Path, lie: str) -> Path:
    """A Python that runs what it is given after `lie`, as a stripped or an old one would."""
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{lie}; exec(__import__(\'sys\').argv[1])" "$2"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return _interpreter(tmp_path / "old", "import sys; sys.version_info = (3, 10, 2)")


@pytest.fixture
def stripped(tmp_path: Path) -> Path:
    return _interpreter(tmp_path / "stripped", "import sys; sys.modules['ensurepip'] = None")


def test_the_first_interpreter_that_fits_is_taken_and_the_venv_kept(tmp_path: Path, old: Path, stripped: Path) -> None:
    done = _make_venv(tmp_path / "venv", "no-such-python", old, stripped, sys.executable)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "venv" / "bin" / "python").exists()
    assert _make_venv(tmp_path / "venv", "no-such-python").returncode == 0


def test_a_missing_venv_module_is_explained(tmp_path: Path, old: Path, stripped: Path) -> None:
    done = _make_venv(tmp_path / "venv", old, stripped)
    assert done.returncode == 1
    assert "lacks the venv module" in done.stderr
    assert "apt install python3." in done.stderr
    assert not (tmp_path / "venv").exists()


def test_no_fitting_python_is_explained(tmp_path: Path, old: Path) -> None:
    done = _make_venv(tmp_path / "venv", old, "no-such-python")
    assert done.returncode == 1
    assert "no Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize(
    ("need", "require", "code", "says"),
    [
        ("sh", "", 0, "1 passed"),
        ("sh", "sh", 0, "1 passed"),
        ("no-such-tool", "", 0, "no-such-tool is not on the PATH"),
        ("no-such-tool", "curl", 0, "1 skipped"),
        ("no-such-tool", "curl no-such-tool", 1, "REQUIRE names no-such-tool"),
        ("gpu99", "gpu99", 1, "REQUIRE names gpu99"),
    ],
)
def test_what_a_test_lacks_is_a_skip_unless_required(
    tmp_path: Path, need: str, require: str, code: int, says: str
) -> None:
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.needs({need!r})\ndef test_it():\n    assert True\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "tests.conftest", "--rootdir", str(tmp_path), "test_it.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "REQUIRE": require},
        check=False,
    )
    assert (done.returncode, says in done.stdout) == (code, True), done.stdout + done.stderr
