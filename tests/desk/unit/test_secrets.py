"""No password, token or key of the environment is in a message, whatever library wrote it and whatever the scheme."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.desk.cli import main
from finetune.errors import without_secrets
from finetune.recipe.urls import without_credentials

SECRET = "s3cr3t-of-mine"
ADDRESSES = (
    *(
        f"{scheme}://me:{SECRET}@host.example/a.jsonl"
        for scheme in ("https", "s3", "gs", "hf", "ftp", "file", "memory")
    ),
    f"hf://datasets/me:{SECRET}@org/name/a.jsonl",
    f"https://host.example/a.jsonl?token={SECRET}",
    f"me:{SECRET}@host.example/a.jsonl",
    f"hf:/me:{SECRET}@org/name",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_message_has_no_password(address: str) -> None:
    assert SECRET not in without_secrets(f"{address}: no such file")
    assert "no such file" in without_secrets(f"{address}: no such file")
    if "://" in address:
        assert SECRET not in without_credentials(address)


@pytest.mark.parametrize("address", [one for one in ADDRESSES if not one.startswith(("https", "ftp", "s3", "gs"))])
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_check_shows_no_password(
    address: str,
    options: tuple[str, ...],
    recipe: dict[str, object],
    write_recipe: object,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path: Path = write_recipe(recipe)  # type: ignore[operator]
    words = ["finetune", "check", str(path), f"data.train=[{{path: '{address}'}}]", *options]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err


@pytest.mark.parametrize(
    "text",
    [
        "refused: Bearer abcdefgh12345678",
        "the token hf_abcdefghijklmnopqrstuv is not valid",
        "key sk-abcdefghijklmnop1234 has no credit",
        "ghp_abcdefghijklmnop1234 was refused",
        "a function raised: ValueError('hunter22-of-mine')",
    ],
)
def test_tokens_and_secret_variables_are_cut(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter22-of-mine")
    shown = without_secrets(text)
    assert "***" in shown
    assert not any(secret in shown for secret in ("abcdefgh", "hunter22"))


@pytest.mark.parametrize(
    "text",
    [
        "recipe.yaml:12: data.train: no such file",
        "a.jsonl:3: mail me@example.org",
        "at 12:30:59, step 3",
        "org/name@main",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert without_secrets(text) == text
