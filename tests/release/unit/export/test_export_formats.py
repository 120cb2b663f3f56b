"""The table of formats."""

from __future__ import annotations

import pytest

from finetune.errors import UserError
from finetune.release.export.figures import AS_BASE, THRESHOLDS
from finetune.release.export.formats import EXPORTS, ExportOptions, check_options


def test_each_type_of_weights_has_a_threshold():
    names = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
    types = {kind for export in EXPORTS.values() for kind in (*export.dtypes, *export.quantized)}
    assert {names.get(kind, kind) for kind in types} | {*AS_BASE} == set(THRESHOLDS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ExportOptions("onnx"), f"--to onnx: no such format. Fix: give one of {', '.join(EXPORTS)}"),
        (
            ExportOptions("gguf", dtype="bfloat16"),
            "--dtype bfloat16: no type of `--to gguf`. Fix: give one of f32, bf16, f16, q8_0",
        ),
        (
            ExportOptions("vllm", dtype="q8_0"),
            "--dtype q8_0: no type of `--to vllm`. Fix: give one of float32, bfloat16, float16",
        ),
        (ExportOptions("ollama", quantized="int8"), "--quantize int8: only goes with --to hf or vllm"),
        (ExportOptions(quantized="int3"), "--quantize int3: no such type. Fix: give one of int8, fp8"),
        (ExportOptions("base", dtype="bfloat16"), "--dtype bfloat16: no type of `--to base`. Fix: leave it out"),
        (ExportOptions("gguf", gpus=8), "--gpus only applies to --to hf and --to vllm"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: ExportOptions, message: str):
    with pytest.raises(UserError, match=message):
        check_options(options)
