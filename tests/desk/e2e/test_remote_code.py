"""Code in a model's folder never runs because a line `y` is on standard input."""

from __future__ import annotations

import ast
import inspect
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import yaml
from conftest import ROOT

from finetune.desk import cli
from finetune.errors import UserError
from finetune.models.remote_code import load_auto, trusts_code

MARKS = "from pathlib import Path\nPath({!r}).touch()\n"
CONFIG = "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own_kind'\n"


@pytest.fixture(scope="module")
def folders(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose models bring Python files along, each of which would create `marker`."""
    root = tmp_path_factory.mktemp("remote-code")
    marks = MARKS.format(str(root / "marker"))

    def own(name: str, trusted: bool = False, base: str | None = None) -> Path:
        """A run with the model in `model`, as if it had been trained."""
        run = root / name
        shutil.copytree(made / "llama", run / "model")
        data = {"train": [{"path": str(made / "rows.jsonl"), "format": "messages"}], "max_length": 64}
        model = {"name": base or str(run / "model"), "trust_remote_code": trusted}
        recipe = {"model": model, "mode": "lora" if base else "full", "data": data, "batch": {"rows": 4}}
        recipe |= {"optimizer": {"lr": 1e-3}, "train": {"max_steps": 1, "precision": "fp32"}}
        recipe |= {"lora": {"rank": 4, "targets": ["q_proj"]}} if base else {}
        (run / "recipe.yaml").write_text(yaml.safe_dump({"run": {"name": name, "dir": str(root)}, **recipe}))
        return run / "model"

    def changed(file: Path, **values: object) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    for name in ("kind", "trusted"):
        kind = own(name, trusted=name == "trusted")
        auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        changed(kind / "config.json", model_type="own_kind", auto_map=auto)
        (kind / "own.py").write_text(marks + CONFIG)
    tokenizer = own("tokenizer")
    auto = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    changed(tokenizer / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto)
    (tokenizer / "own.py").write_text(marks)
    generating = own("generating") / "custom_generate"
    generating.mkdir()
    (generating / "generate.py").write_text(marks + "def generate(model, **_):\n    return None\n")
    adapter = own("adapter", base=str(root / "kind" / "model"))
    (adapter / "config.json").unlink()
    settings = {"base_model_name_or_path": str(root / "kind" / "model"), "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"r": 4, "target_modules": ["q_proj"]}))
    return root


COMMANDS = {
    "generate": ("{run}", "green", "--max-new-tokens", "2"),
    "chat": ("{run}", "--max-new-tokens", "2"),
    "serve": ("{run}", "--port", "0"),
    "export": ("{run}", "-o", "{out}"),
    "verify": ("{run}/model", "--against", "{run}"),
    "merge": ("{run}", "-o", "{out}"),
    "check": ("{run}/recipe.yaml",),
    "inspect": ("{run}/recipe.yaml",),
}
RUNS = [(command, "kind") for command in COMMANDS if command not in ("merge", "inspect")]
RUNS += [(command, name) for command in ("generate", "export") for name in ("tokenizer", "adapter")]
RUNS += [("serve", "adapter"), ("merge", "adapter"), ("generate", "generating"), ("inspect", "tokenizer")]


@pytest.mark.parametrize(("command", "name"), RUNS)
def test_a_line_y_is_no_consent(
    command: str,
    name: str,
    folders: Path,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"run": folders / name, "rows": made / "rows.jsonl", "out": tmp_path / "out"}
    (folders / "marker").unlink(missing_ok=True)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 50))
    monkeypatch.setattr("sys.argv", ["finetune", command, *(word.format(**places) for word in COMMANDS[command])])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = " ".join(capsys.readouterr().err.split())
    assert not (folders / "marker").exists()
    assert ended.value.code == (0 if name == "generating" else 2), said
    if name != "generating":  # whose model is whole without that file
        assert "runs Python code of its own repository" in said
        assert "model.trust_remote_code: true" in said


@pytest.mark.long
def test_a_process_with_a_pipe_does_not_ask(folders: Path) -> None:
    command = [sys.executable, "-m", "finetune", "generate", str(folders / "kind")]
    done = subprocess.run(command, input="y\ny\n", capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, (folders / "marker").exists()) == (2, False), done.stderr
    assert "model.trust_remote_code: true" in " ".join(done.stderr.split())
    assert "[y/N]" not in done.stdout + done.stderr


def test_the_recipe_s_key_is_consent(folders: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of its own run alone, and of nothing that lies elsewhere."""
    from transformers import AutoConfig
    from transformers import dynamic_module_utils as modules

    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    model = folders / "trusted" / "model"
    assert trusts_code(model)
    assert not trusts_code(folders / "kind" / "model")
    elsewhere = shutil.copytree(model, tmp_path / "copy")
    assert not trusts_code(elsewhere)
    with pytest.raises(UserError, match="not trusted"):
        load_auto(AutoConfig, elsewhere)
    assert not (folders / "marker").exists()
    try:
        assert type(load_auto(AutoConfig, model)).__name__ == "OwnConfig"
        assert (folders / "marker").exists()
    finally:
        (folders / "marker").unlink(missing_ok=True)


# Classes of transformers and peft that read settings or weights and know no code of a repository; `cls` is an image
# processor's and `kind` a model's class of transformers itself.
WITHOUT_CODE = {
    "GenerationConfig",
    "PeftConfig",
    "PeftModel",
    "cls",
    "kind",
    "getattr(transformers_module(module), name)",
}


def test_every_call_says_whether_code_may_run() -> None:
    """`from_pretrained` and `from_config` without the argument are what asks on the terminal."""
    bare, seen = [], 0
    for file in sorted((ROOT / "finetune").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("from_pretrained", "from_config"):
                continue
            seen += 1
            says = any(keyword.arg == "trust_remote_code" for keyword in node.keywords)
            if not says and ast.unparse(node.func.value) not in WITHOUT_CODE:
                bare.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert not bare, "use load_auto or from_config of finetune/models/remote_code.py"
    assert seen > 10
    assert "trust_remote_code" not in inspect.signature(datasets.load_dataset).parameters  # it runs no scripts
