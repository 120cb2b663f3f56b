"""Exports of runs on sound, of each family: they load by transformers' classes, and answer as the run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hearing
import pytest
from conftest import finetune
from plain_documents import Plain, metric
from rich.console import Console
from safetensors.torch import load_file
from test_audio_runs import WHOLE, train_on_clips
from transformers import AutoFeatureExtractor, AutoModelForMultimodalLM, AutoTokenizer

from finetune.errors import RunFailure
from finetune.models.checkpoint_files import PROCESSORS
from finetune.release.export.commands import ExportOptions, export_run, verify_run
from finetune.release.inference.answering import answer_file
from finetune.release.inference.sampling import Sampling

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

QUIET = Console(quiet=True)
# peft names stacked experts, for which it looks among modules only.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audio-exports")
    hearing.write_clips(folder, "single", 8, numbers=(0, 1, 1))
    return folder


def answered(model: Path, rows: Path, out: Path) -> list[str]:
    """The answers to a file's questions."""
    answer_file(model, rows, out, Sampling(6), None, 4, QUIET)
    return [json.loads(line)["answer"] for line in out.read_text().splitlines()]


def settings_of(folder: Path) -> dict[str, Any]:
    return {name: json.loads((folder / name).read_text()) for name in PROCESSORS if (folder / name).is_file()}


@pytest.mark.parametrize("name", hearing.families("qwen2_5_omni_thinker"))
@pytest.mark.parametrize("mode", ["lora", pytest.param("full", marks=pytest.mark.long)])
def test_an_export_is_the_run(mode: str, name: str, ears: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    more: dict[str, Any] = {"lora": {"rank": 2, "alpha": 4.0}} if mode == "lora" else {}
    base, rows = hearing.save_hearing(ears, name), ears / "single.jsonl"
    model = {"train": WHOLE, "name": str(base)}
    run = train_on_clips(ears, name, f"exported-{mode}", "single", mode=mode, model=model, **more)
    exported = export_run(run, ExportOptions(out=tmp_path / "export"), QUIET)
    assert (exported["kl_mean"] < 1e-9, exported["top1"]) == (True, 1)
    written, plain = AutoModelForMultimodalLM.from_pretrained(tmp_path / "export").eval(), Plain(run)
    assert plain.loss(written) == pytest.approx(metric(run, "eval_loss")[-1], rel=2e-6)
    if mode == "lora":
        adapted = PeftModel.from_pretrained(AutoModelForMultimodalLM.from_pretrained(base), run / "model").eval()
        assert plain.loss(written) == pytest.approx(plain.loss(adapted), rel=2e-6)
        verified = verify_run(run / "model", run, None, None, 8, QUIET)
        assert verified is not None
        assert not verified.problems
    assert settings_of(tmp_path / "export") == settings_of(run / "model") == settings_of(base)
    extractors = [AutoFeatureExtractor.from_pretrained(folder).to_dict() for folder in (tmp_path / "export", base)]
    assert extractors[0] == extractors[1]
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "export", base)]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert answered(tmp_path / "export", rows, tmp_path / "1") == answered(run, rows, tmp_path / "2")
    if mode == "full":
        done = finetune("verify", tmp_path / "export", "--against", run)
        assert done.returncode == 0, done.stderr
    (tmp_path / "export" / "preprocessor_config.json").unlink()
    with pytest.raises(RunFailure, match=r"preprocessor_config\.json is missing"):
        verify_run(tmp_path / "export", run, None, None, 2, QUIET)


@pytest.mark.long
def test_a_model_that_talks_is_exported_as_its_thinker(ears: Path, tmp_path: Path) -> None:
    """Its result, and a checkpoint, whose untrained tensors are those of the whole model's files, under other names."""
    name = "qwen2_5_omni_thinker"
    thinker, whole = hearing.save_hearing(ears, name), hearing.save_talking(ears, name)
    model = {"train": ["language"], "name": str(whole)}
    run = train_on_clips(ears, name, "talking", "single", model=model, checkpoint={"every_steps": 4})
    plain = Plain(run)
    for step in (None, "4"):
        out = tmp_path / f"export-{step}"
        assert export_run(run, ExportOptions(out=out, step=step), QUIET)["kl_mean"] < 1e-9
        written = AutoModelForMultimodalLM.from_pretrained(out).eval()
        assert type(written).__name__ == "Qwen2_5OmniThinkerForConditionalGeneration"
        assert plain.loss(written) == pytest.approx(metric(run, "eval_loss")[-1], rel=2e-6)
        assert not any("talker" in key or key.startswith("thinker") for key in load_file(out / "model.safetensors"))
        assert settings_of(out) == settings_of(thinker)
