"""Every mistake in a recipe is answered with its place, its key, what was expected and what to do.

`GOOD` has one section a line, so a case is the lines that it changes and the problems that it must give: all of them,
and no others, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from finetune.features import load_recipe
from finetune.recipe import Recipe, RecipeError, divisibility_message

GOOD = (
    "run: {name: a}",  # 1
    "model: {name: org/model}",  # 2
    "mode: full",  # 3
    "data: {train: [{path: a.jsonl, format: messages}], max_length: 64}",  # 4
    "batch: {rows: 8}",  # 5
    "optimizer: {lr: 1e-4}",  # 6
    "train: {epochs: 1}",  # 7
)
EVAL = "data: {train: [{path: a.jsonl, format: messages}], eval: [{path: b.jsonl, format: messages}], max_length: 64}"
SHORT = "data: {max_length: 64, train: %s}"
LORA = "lora: {rank: 16, alpha: 32}"
PAIRS = "data: {train: [{path: a.jsonl, format: preference}], max_length: 64}"


@dataclass
class Bad:
    """A recipe that must not load. `problems`: as printed, with `:8` for line 8 of the recipe itself."""

    name: str
    problems: list[str]
    lines: dict[int, str] = field(default_factory=dict)  # changed or added lines of GOOD
    text: str | None = None  # the whole file, instead
    overrides: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # beside the recipe


CASES = [
    # --- keys ---
    Bad("unknown key, near miss", [":1: run.sed: unknown key; did you mean `seed`?"], {1: "run: {name: a, sed: 3}"}),
    Bad(
        "variable in a path",
        [
            ":1: run.dir: a recipe reads no variables, as in `${SCRATCH}/runs`: write the path, or give `run.dir=...` "
            "on the command line, where the shell reads them"
        ],
        {1: 'run: {name: a, dir: "${SCRATCH}/runs"}'},
    ),
    Bad("unknown section", [":8: evalute: unknown key; did you mean `evaluate`?"], {8: "evalute: {every_steps: 2}"}),
    Bad(
        "unknown key, three levels down",
        [":4: data.train[0].fromat: unknown key; did you mean `format`?"],
        {4: "data: {train: [{path: a.jsonl, format: messages, fromat: text}], max_length: 64}"},
    ),
    Bad(
        "unknown key, nothing like it",
        [":5: batch.zzz: unknown key; valid here: rows, rows_per_device, tokens_per_device"],
        {5: "batch: {rows: 8, zzz: 1}"},
    ),
    Bad(
        "key of another section",
        [":5: batch.packing: unknown key; did you mean `data.packing`?"],
        {5: "batch: {rows: 8, packing: true}"},
    ),
    Bad(
        "key of several other sections",
        [":7: train.every_steps: unknown key; did you mean `evaluate.every_steps` or `checkpoint.every_steps`?"],
        {7: "train: {epochs: 1, every_steps: 3}"},
    ),
    Bad(
        "key of another program, and the key that it stands for",
        [":6: optimizer.lr: is missing", ":6: optimizer.learning_rate: unknown key; did you mean `optimizer.lr`?"],
        {6: "optimizer: {learning_rate: 1e-4}"},
    ),
    Bad(
        "keys of other tools, with a place and without one",
        [
            ":8: sample_packing: unknown key; did you mean `data.packing`?",
            ":9: lora_r: unknown key; did you mean `lora.rank`?",
            ":10: load_in_4bit: unknown key; set `mode: qlora` and `quantization: {type: nf4}`",
            ":11: chat_template_kwargs: unknown key; did you mean `model.chat_template_arguments`?",
        ],
        {8: "sample_packing: true", 9: "lora_r: 8", 10: "load_in_4bit: true", 11: "chat_template_kwargs: {a: 1}"},
    ),
    Bad(
        "keys of other tools in a source",
        [
            ":4: data.train[0].type: unknown key; did you mean `format`?",
            ":4: data.train[0].field_messages: unknown key; set `columns: {messages: ...}`",
        ],
        {4: "data: {train: [{path: a.jsonl, type: alpaca, field_messages: turns}], max_length: 64}"},
    ),
    Bad(
        "no section is suggested for a value, and nothing that is not alike",
        [
            f":8: trainer: unknown key; valid here: {', '.join([*Recipe.model_fields, 'extends'])}",
            ":9: loras: unknown key; did you mean `lora`?",
        ],
        {8: "trainer: fast", 9: "loras: {rank: 8}"},
    ),
    Bad(
        "another name for the loss",
        [
            ":8: objective.name: expected 'sft', 'focal', 'dpo', 'kto', 'orpo', 'reward', 'classify', 'distill', "
            "'grpo' or 'own', got \"simpo\" (text); set `dpo` and `objective.loss: simpo`"
        ],
        {8: "objective: {name: simpo}"},
    ),
    Bad(
        "a name in place of a section",
        [':6: optimizer: expected a section, got "adamw_torch" (text); did you mean `optimizer.name`?'],
        {6: "optimizer: adamw_torch"},
    ),
    Bad(
        "accumulation is not a choice",
        [
            ":5: batch.gradient_accumulation_steps: unknown key; accumulation follows from `batch.rows`, "
            "`batch.rows_per_device` and the number of processes; `batch.rows` is micro-batch x "
            "accumulation x processes"
        ],
        {5: "batch: {rows: 8, gradient_accumulation_steps: 4}"},
    ),
    Bad(
        "extends in a section",
        [":1: run.extends: unknown key; it belongs at the top level of a recipe"],
        {1: "run: {name: a, extends: b}"},
    ),
    # --- missing ---
    Bad(
        "missing, and its misspelling",
        [
            ":4: data.max_length: is missing; `max_lenght` looks like a misspelling of it",
            ":4: data.max_lenght: unknown key; did you mean `max_length`?",
        ],
        {4: "data: {train: [{path: a.jsonl, format: messages}], max_lenght: 64}"},
    ),
    Bad("missing sections", [":1: batch: is missing", ":1: train: is missing"], {5: "", 7: ""}),
    Bad(
        "missing in a list item",
        [":4: data.train[0].path: is missing"],
        {4: "data: {train: [{format: text}], max_length: 64}"},
    ),
    Bad("a section left empty", [":7: train: expected a section, got null"], {7: "train:"}),
    # --- types ---
    Bad("whole number", [":5: batch.rows: expected an integer, got 8.0"], {5: "batch: {rows: 8.0}"}),
    Bad("number", [':6: optimizer.lr: expected a number, got "small" (text)'], {6: "optimizer: {lr: small}"}),
    Bad(
        "a quoted number is text",
        [':6: optimizer.lr: expected a number, got "1e-4" (text)'],
        {6: 'optimizer: {lr: "1e-4"}'},
    ),
    Bad("a truth is no number", [":6: optimizer.lr: expected a number, got true"], {6: "optimizer: {lr: true}"}),
    Bad(
        "yes is a word",
        [':7: train.compile: expected true or false, got "yes" (text)'],
        {7: "train: {epochs: 1, compile: yes}"},
    ),
    Bad(
        "text",
        [":2: model.revision: expected text, got 1234567; quote it"],
        {2: "model: {name: org/model, revision: 1234567}"},
    ),
    Bad(
        "a list",
        [":4: data.train: expected a list or a path, got a section"],
        {4: "data: {train: {path: a.jsonl, format: messages}, max_length: 64}"},
    ),
    Bad("a section", [":5: batch: expected a section, got 8"], {5: "batch: 8"}),
    Bad(
        "a section of columns",
        [":4: data.train[0].columns: expected a section, got a list of 1"],
        {4: "data: {train: [{path: a, format: text, columns: [text]}], max_length: 64}"},
    ),
    Bad(
        "text in columns",
        [":4: data.train[0].columns.text: expected text, got a list of 2"],
        {4: "data: {train: [{path: a, format: text, columns: {text: [b, c]}}], max_length: 64}"},
    ),
    Bad("finite", [":6: optimizer.lr: expected a finite number, got inf"], {6: "optimizer: {lr: .inf}"}),
    Bad(
        "a long value is shortened",
        [f':6: optimizer.lr: expected a number, got "{"x" * 56}...'],
        {6: f"optimizer: {{lr: {'x' * 80}}}"},
    ),
    # --- ranges ---
    Bad("greater than", [":6: optimizer.lr: expected a number > 0, got 0"], {6: "optimizer: {lr: 0}"}),
    Bad("at least", [":5: batch.rows: expected a number >= 1, got 0"], {5: "batch: {rows: 0}"}),
    Bad(
        "at most",
        [":8: schedule.min_lr_ratio: expected a number <= 1, got 1.5"],
        {8: "schedule: {min_lr_ratio: 1.5}"},
    ),
    Bad(
        "less than",
        [":1: run.seed: expected a number < 2147483648, got 2147483648"],
        {1: "run: {name: a, seed: 2147483648}"},
    ),
    Bad(
        "no items",
        [":4: data.train: expected at least 1 item, got a list of 0"],
        {4: "data: {train: [], max_length: 64}"},
    ),
    Bad(
        "too many items",
        [":6: optimizer.betas: expected 2 items, got a list of 3"],
        {6: "optimizer: {lr: 1e-4, betas: [0.9, 0.95, 0.99]}"},
    ),
    Bad(
        "too few items",
        [":6: optimizer.betas: expected 2 items, got a list of 1"],
        {6: "optimizer: {lr: 1e-4, betas: [0.9]}"},
    ),
    Bad(
        "an item",
        [":6: optimizer.betas[1]: expected a number < 1, got 95"],
        {6: "optimizer: {lr: 1e-4, betas: [0.9, 95]}"},
    ),
    Bad("empty text", [':1: run.name: expected non-empty text, got "" (text)'], {1: "run: {name: ''}"}),
    Bad(
        "a run name that is no folder name",
        [
            ":1: run.name: expected letters, digits, `.`, `_` and `-`, starting with a letter or digit, and "
            'values such as `{optimizer.lr}`, got "a/b" (text)'
        ],
        {1: "run: {name: a/b}"},
    ),
    Bad(
        "a choice",
        [":3: mode: expected 'full', 'lora' or 'qlora', got \"lorra\" (text); did you mean `lora`?"],
        {3: "mode: lorra"},
    ),
    Bad("a choice, not even text", [":3: mode: expected 'full', 'lora' or 'qlora', got 3"], {3: "mode: 3"}),
    Bad(
        "one of two types",
        [
            ":8: lora.targets: expected 'all-linear' or a list or names with commas, got \"all-liner\" (text); did you "
            "mean `all-linear`?"
        ],
        {3: "mode: lora", 8: "lora: {targets: all-liner}"},
    ),
    Bad(
        "one of two types: the branch that came further is the one meant",
        [":8: lora.targets[1]: expected text, got 3; quote it"],
        {3: "mode: lora", 8: "lora: {targets: [q_proj, 3]}"},
    ),
    # --- short forms ---
    Bad("an empty path", [':4: data.train[0].path: expected non-empty text, got "" (text)'], {4: SHORT % '""'}),
    Bad("no path in a list", [":4: data.train[1]: expected a section, got 5"], {4: SHORT % "[a.jsonl, 5]"}),
    Bad("a whole share", [":4: data.eval.share: expected a number < 1, got 1.5"], {4: SHORT % "a.jsonl, eval: 1.5"}),
    Bad(
        "no share, no path",
        [":4: data.eval: expected a section or a list or a path or a share, got true"],
        {4: SHORT % "a.jsonl, eval: true"},
    ),
    Bad(
        "no project",
        [":8: tracking.wandb: expected a section or true or a project's name, got 5"],
        {8: "tracking: {wandb: 5}"},
    ),
    Bad(
        "a name that is nothing",
        [":8: lora.targets: expected 'all-linear' or at least 1 item or names with commas, got a list of 0"],
        {3: "mode: lora", 8: "lora: {targets: ','}"},
    ),
    Bad(
        "a key of no tracker",
        ["command line, 'tracking.wandb.projct=x': tracking.wandb.projct: unknown key; did you mean `project`?"],
        {8: "tracking: {wandb: true}"},
        overrides=["tracking.wandb.projct=x"],
    ),
    # --- a section's own rules ---
    Bad(
        "no model",
        [":2: model: give either `name` (pretrained weights) or `config` (from scratch)"],
        {2: "model: {dtype: auto}"},
    ),
    Bad(
        "two models",
        [":2: model: give either `name` (pretrained weights) or `config` (from scratch), not both"],
        {2: "model: {name: a, config: {model_type: llama}, tokenizer: t}"},
    ),
    Bad(
        "a config without its type",
        [":2: model: `config` needs a `model_type`, such as `llama` or `mistral`"],
        {2: "model: {config: {hidden_size: 8}, tokenizer: t}"},
    ),
    Bad(
        "a config without a tokenizer",
        [":2: model: a model from `config` has no tokenizer of its own: give `tokenizer`"],
        {2: "model: {config: {model_type: llama}}"},
    ),
    Bad("no end", [":7: train: give `epochs` or `max_steps`: the run needs an end"], {7: "train: {precision: fp32}"}),
    # --- rules across sections ---
    Bad(
        "a rate that no weight survives",
        [
            ":6: optimizer.lr: a step of `adamw` moves each weight by up to the rate, and weights are far below 50: "
            "usual under `mode: full` is 1e-5 to 1e-4"
        ],
        {6: "optimizer: {lr: 50}"},
    ),
    Bad(
        "a rate of one for adapters under muon",
        [
            ":6: optimizer.lr: a step of `muon` moves each weight by up to the rate, and weights are far below 1: "
            "usual under `mode: lora` is 1e-4 to 1e-3"
        ],
        {3: "mode: lora", 6: "optimizer: {name: muon, lr: 1}", 8: LORA},
    ),
    Bad(
        "lora without its section",
        [":3: mode: `mode: lora` needs a `lora:` section, such as `lora: {rank: 16, alpha: 32}`"],
        {3: "mode: lora"},
    ),
    Bad(
        "full with lora",
        [":8: lora: `mode: full` trains every weight and does not use `lora:`; remove it or set `mode: lora`"],
        {8: LORA},
    ),
    Bad(
        "qlora without its sections",
        [
            ":3: mode: `mode: qlora` needs a `lora:` section, such as `lora: {rank: 16, alpha: 32}`",
            ":3: mode: `mode: qlora` needs a `quantization:` section, such as `quantization: {type: nf4}`",
        ],
        {3: "mode: qlora"},
    ),
    Bad(
        "fp8 with what four bits have",
        [
            ":8: lora.dora: peft reads the base's matrices, which it cannot unpack from fp8: use `type: nf4`, or false",
            ":9: quantization.double_quant: is for 4 bits: `type: fp8` has one scale for each row. Set it to null",
        ],
        {
            3: "mode: qlora",
            8: "lora: {rank: 16, alpha: 32, dora: true}",
            9: "quantization: {type: fp8, double_quant: true}",
        },
    ),
    Bad(
        "scaled products of four bits",
        [":9: quantization.compute: `scaled` multiplies in fp8, not in `type: nf4`: use `type: fp8`, or `dequantised`"],
        {3: "mode: qlora", 8: LORA, 9: "quantization: {compute: scaled}"},
    ),
    Bad(
        "scaled products in fp32",
        [
            ":9: quantization.compute: products of `scaled` come out in bf16, against `train.precision: fp32`: "
            "use bf16, or `dequantised`"
        ],
        {
            3: "mode: qlora",
            7: "train: {epochs: 1, precision: fp32}",
            8: LORA,
            9: "quantization: {type: fp8, compute: scaled}",
        },
    ),
    Bad(
        "quantised without qlora",
        [":9: quantization: only `mode: qlora` quantizes; remove this section or change `mode: lora`"],
        {3: "mode: lora", 8: LORA, 9: "quantization: {type: nf4}"},
    ),
    Bad(
        "adapters on random weights",
        [":2: model.config: `mode: lora` adapts a pretrained model: give `model.name`, or `mode: full`"],
        {2: "model: {config: {model_type: llama}, tokenizer: t}", 3: "mode: lora", 8: LORA},
    ),
    Bad(
        "rows that do not divide",
        [":5: batch.rows: 10 must be divisible by rows_per_device x processes (4 x 1 = 4); nearest: 8, 12"],
        {5: "batch: {rows: 10, rows_per_device: 4}"},
    ),
    Bad(
        "rows to be found where losses would depend on them",
        [
            ":5: batch.rows_per_device: dropout is sampled per micro-batch, so with `auto` losses would depend on the "
            "hardware (lora.dropout: 0.1): set a number, or `lora.dropout: 0`",
        ],
        {3: "mode: lora", 5: "batch: {rows: 8, rows_per_device: auto}", 8: "lora: {dropout: 0.1}"},
    ),
    Bad(
        "rows to be found where there may be one forward",
        [
            ":5: batch.rows_per_device: `optimizer.in_backward` needs one micro-batch per step, which `auto` does not "
            "guarantee: set it to `batch.rows` divided by the number of processes",
        ],
        {
            5: "batch: {rows: 8, rows_per_device: auto}",
            6: "optimizer: {lr: 1e-4, in_backward: true, max_grad_norm: null}",
        },
    ),
    Bad(
        "weights of a type that the precision cannot use",
        [
            ":2: model.dtype: `train.precision: fp32` supports weights in float32, not bfloat16; `auto` always works",
        ],
        {2: "model: {name: a, dtype: bfloat16}", 7: "train: {epochs: 1, precision: fp32}"},
    ),
    Bad(
        "evaluation of nothing",
        [
            f":8: evaluate.{key}: needs evaluation data: add `data.eval`, or remove this"
            for key in ("every_steps", "generate", "exact_match")
        ],
        {8: "evaluate: {every_steps: 5, generate: 2, exact_match: 10}"},
    ),
    Bad(
        "generation from text",
        [":8: evaluate.generate: rows of format `text` have no prompt: set `generate` and `exact_match` to 0"],
        {4: EVAL.replace("b.jsonl, format: messages", "b.txt, format: text"), 8: "evaluate: {generate: 2}"},
    ),
    Bad(
        "an argument that rendering gives",
        [":2: model.chat_template_arguments: `messages` is set when the template is rendered"],
        {2: "model: {name: a, chat_template_arguments: {messages: 1}}"},
    ),
    Bad(
        "an argument of no name",
        [":2: model.chat_template_arguments: `a-b` is not a valid name of a variable"],
        {2: "model: {name: a, chat_template_arguments: {a-b: 1}}"},
    ),
    Bad(
        "an argument that is no number",
        [":2: model.chat_template_arguments: `depth`: not a JSON value; give it as text"],
        {2: "model: {name: a, chat_template_arguments: {depth: .inf}}"},
    ),
    Bad(
        "an early stop without evaluations",
        [":7: train.stop_when: needs evaluations during the run: set `data.eval` and `evaluate.every_steps`"],
        {4: EVAL, 7: "train: {max_steps: 9, stop_when: {patience: 2}}"},
    ),
    Bad(
        "a best result without a metric",
        [":7: train.result: `best` needs a metric: set `checkpoint.best`, such as `checkpoint: {best: eval_loss}`"],
        {4: EVAL, 7: "train: {max_steps: 9, result: best}"},
    ),
    Bad(
        "generation where prompts are trained",
        [
            ":8: evaluate.generate: under `objective.train_on: all` the prompt is trained as well and cannot be "
            "distinguished from the answer: set `generate` and `exact_match` to 0"
        ],
        {4: EVAL, 8: "evaluate: {exact_match: 2}\nobjective: {train_on: all}"},
    ),
    Bad(
        "no regular expression",
        [":8: evaluate.answer: is not a valid regular expression: missing ), unterminated subpattern at position 5"],
        {4: EVAL, 8: "evaluate: {exact_match: 10, answer: '#### (.+'}"},
    ),
    Bad(
        "a regular expression without a group",
        [":8: evaluate.answer: needs a group for the answer, such as `#### (.+)`"],
        {4: EVAL, 8: "evaluate: {exact_match: 10, answer: '#### .+'}"},
    ),
    Bad(
        "an answer that nobody asks for",
        [":8: evaluate.answer: is used only by `evaluate.exact_match` and `word_error_rate`, which are 0"],
        {4: EVAL, 8: "evaluate: {answer: '#### (.+)'}"},
    ),
    Bad(
        "a stream without an end",
        [":4: data.streaming: the length of a stream is unknown: set `train.max_steps` and remove `train.epochs`"],
        {4: "data: {train: [{path: a.jsonl}], max_length: 64, streaming: true}"},
    ),
    Bad(
        "a stream that is not packed",
        [":4: data.streaming: streams are always packed: set `data.packing: true`"],
        {
            4: "data: {train: [{path: a.jsonl}], max_length: 64, streaming: true, packing: false}",
            7: "train: {max_steps: 9}",
        },
    ),
    Bad(
        "sizes of a stream",
        [
            ":4: data.mixture.temperature: the size of a stream is unknown: remove it, and set each source's `weight`",
            ":4: data.train[1].max_epochs: must be an integer with `data.streaming`",
        ],
        {
            4: "data: {train: [{path: a}, {path: b, max_epochs: 1.5}], max_length: 64, streaming: true, "
            "mixture: {temperature: 2}}",
            7: "train: {max_steps: 9}",
        },
    ),
    Bad(
        "a mixture of one",
        [":4: data.mixture: needs several sources in `data.train`; remove this"],
        {4: "data: {train: [{path: a.jsonl}], max_length: 64, mixture: {by: rows}}"},
    ),
    Bad(
        "keys of another objective",
        [":8: objective.z_loss: has no effect under `name: focal`, only under sft: remove it"],
        {8: "objective: {name: focal, z_loss: 1e-4}"},
    ),
    Bad(
        "reward model that generates, with an LM head's settings",
        [
            ":2: model.cross_entropy: a model of `objective.name: reward` has no LM head: remove it",
            ":9: evaluate.generate: a model of `objective.name: reward` scores texts, it generates none: set it to 0",
            ":10: lora.targets: under `objective.name: reward` the head `score` is trained in full: leave it out",
        ],
        {
            2: "model: {name: org/model, cross_entropy: chunked}",
            3: "mode: lora",
            4: EVAL.replace("messages", "preference"),
            8: "objective: {name: reward}",
            9: "evaluate: {generate: 2}",
            10: "lora: {rank: 4, alpha: 8, targets: [q_proj, score]}",
        },
    ),
    Bad(
        "gamma without focal loss",
        [":8: objective.gamma: has no effect under `name: sft`, only under focal: remove it"],
        {8: "objective: {gamma: 1.0}"},
    ),
    Bad(
        "distillation without a teacher",
        [
            ":8: objective.teacher: `name: distill` needs a teacher: a model with the same vocabulary, or a .parquet "
            "file of its predictions"
        ],
        {8: "objective: {name: distill}"},
    ),
    Bad(
        "draws and top k, of another divergence",
        [
            ":8: objective.samples: replaces `top_k`: remove one of the two",
            ":8: objective.samples: draws from the teacher estimate forward_kl only, not reverse_kl: use `top_k`",
        ],
        {8: "objective: {name: distill, teacher: m, samples: 12, top_k: 8, divergence: reverse_kl}"},
    ),
    Bad(
        "jsd_beta of another divergence",
        [":8: objective.jsd_beta: has an effect under `divergence: jsd` only: remove it"],
        {8: "objective: {name: distill, teacher: m, jsd_beta: 0.5}"},
    ),
    Bad(
        "jsd_beta at an end",
        [":8: objective.jsd_beta: expected a number < 1, got 1.0"],
        {8: "objective: {name: distill, teacher: m, divergence: jsd, jsd_beta: 1.0}"},
    ),
    Bad(
        "a stream under distillation",
        [
            ":4: data.streaming: a teacher's distributions are looked up by example before the run: set it to false",
        ],
        {
            4: "data: {train: [{path: a.jsonl, format: messages}], max_length: 64, streaming: true}",
            7: "train: {max_steps: 10}",
            8: "objective: {name: distill, teacher: m}",
        },
    ),
    Bad(
        "a token budget for packed rows",
        [
            ":5: batch.tokens_per_device: packed sequences have equal length: set `data.packing: false` or remove this",
            ":5: batch.tokens_per_device: replaces `rows_per_device`: remove one of the two",
            ":5: batch.tokens_per_device: 32 must be at least the length of the longest example (data.max_length: 64)",
        ],
        {5: "batch: {rows: 8, rows_per_device: 2, tokens_per_device: 32}"},
    ),
    Bad(
        "two warm-ups",
        [":8: schedule.warmup_ratio: replaces `warmup_steps`: remove one of the two"],
        {8: "schedule: {warmup_steps: 100, warmup_ratio: 0.1}"},
    ),
    # --- YAML ---
    Bad("an empty file", [": is empty; copy one of the files in recipes/"], text="# nothing\n"),
    Bad("a list", [":2: expected sections (`key: value`) at the top level"], text="# one\n- run\n"),
    Bad(
        "a bracket left open",
        [":3: not valid YAML: while parsing a flow mapping, expected ',' or '}', but got ':'"],
        text="run: {name: a}\nmodel: {name: b\nmode: full\n",
    ),
    Bad(
        "a tab",
        [":2: not valid YAML: while scanning for the next token, found character '\\t' that cannot start any token"],
        text="run:\n\tname: a\n",
    ),
    Bad(
        "two documents",
        [":2: not valid YAML: expected a single document in the stream, but found another document"],
        text="run: {name: a}\n---\nmode: full\n",
    ),
    Bad(
        "a control character",
        [":2: not valid YAML: character U+0007 is not allowed"],
        text="run: {name: a}\nmode: \x07\n",
    ),
    Bad(
        "an unknown tag",
        [":1: run: the tag '!thing' is not supported"],
        {1: "run: !thing {name: a}"},
    ),
    Bad(
        "Python is not run",
        [":8: not valid YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os.system'"],
        {8: "x: !!python/name:os.system"},
    ),
    Bad(
        "a tag that does not fit",
        [":5: batch.rows: 'many' does not match its tag 'int'"],
        {5: "batch: {rows: !!int many}"},
    ),
    Bad(
        "keys given twice, at several depths",
        [":2: model.name: duplicate key; keep one", ":8: mode: duplicate key; keep one"],
        {2: "model: {name: a, name: b}", 8: "mode: lora"},
    ),
    Bad(
        "a key that is no word",
        [":5: batch: a key must be a scalar of readable text"],
        {5: "batch: {rows: 8, [1, 2]: 3}"},
    ),
    Bad(
        "an alias inside what it names",
        [":5: batch.rows: an alias inside the value it refers to"],
        {5: "batch: &batch {rows: *batch}"},
    ),
    # --- extends ---
    Bad("extends nothing", [":8: extends: no such file: {dir}/nowhere.yaml"], {8: "extends: nowhere.yaml"}),
    Bad("extends two", [":8: extends: expected the path of one recipe file, got ['a', 'b']"], {8: "extends: [a, b]"}),
    Bad(
        "extends itself",
        [":8: extends: circular `extends`: recipe.yaml -> recipe.yaml"],
        {8: "extends: recipe.yaml"},
    ),
    Bad(
        "extends in a circle",
        ["b.yaml:1: extends: circular `extends`: recipe.yaml -> b.yaml -> recipe.yaml"],
        {8: "extends: b.yaml"},
        files={"b.yaml": "extends: recipe.yaml\n"},
    ),
    Bad(
        "a mistake in what is extended, after those of the file itself",
        [
            ":8: evaluate.generat: unknown key; did you mean `generate`?",
            "b.yaml:2: schedule.nam: unknown key; did you mean `name`?",
        ],
        {8: "evaluate: {generat: 2}", 9: "extends: b.yaml"},
        files={"b.yaml": "# shared\nschedule: {nam: linear}\n"},
    ),
    # --- overrides ---
    Bad(
        "not an override",
        ["command line, 'lr': expected section.key=value, such as optimizer.lr=1e-4"],
        overrides=["lr"],
    ),
    Bad(
        "a dot too many",
        ["command line, 'run..seed=1': expected section.key=value, such as optimizer.lr=1e-4"],
        overrides=["run..seed=1"],
    ),
    Bad(
        "override of the wrong type",
        ["command line, 'optimizer.lr=fast': optimizer.lr: expected a number, got \"fast\" (text)"],
        overrides=["optimizer.lr=fast"],
    ),
    Bad(
        "override of an unknown key",
        ["command line, 'train.epoch=3': train.epoch: unknown key; did you mean `epochs`?"],
        overrides=["train.epoch=3"],
    ),
    Bad(
        "override of an unknown section",
        ["command line, 'optim.lr=3': optim: unknown key; did you mean `optimizer`?"],
        overrides=["optim.lr=3"],
    ),
    Bad(
        "override inside a value",
        ["command line, 'optimizer.lr.max=3': optimizer.lr: expected a number, got a section"],
        overrides=["optimizer.lr.max=3"],
    ),
    Bad(
        "override by a number that the list does not have",
        ["command line, 'data.train.1.path=b': data.train: is a list of 1: expected index 0, got '1'"],
        overrides=["data.train.1.path=b"],
    ),
    Bad(
        "override in a list of several",
        ["command line, 'optimizer.betas.x=0.9': optimizer.betas: is a list of 2: expected 0 to 1, got 'x'"],
        {6: "optimizer: {lr: 1e-4, betas: [0.9, 0.95]}"},
        overrides=["optimizer.betas.x=0.9"],
    ),
    Bad(
        "override in an empty list",
        ["command line, 'data.eval.0.path=b': data.eval: is a list of 0: no valid index, got '0'"],
        {4: EVAL.replace("{path: b.jsonl, format: messages}", "")},
        overrides=["data.eval.0.path=b"],
    ),
    Bad(
        "override inside a list's value",
        ["command line, 'lora.targets.0.x=1': lora.targets[0]: is 'q_proj', which has no key 'x'"],
        {3: "mode: lora", 8: "lora: {targets: [q_proj]}"},
        overrides=["lora.targets.0.x=1"],
    ),
    Bad(
        "override that is no YAML",
        ["command line, 'optimizer.betas=[0.9': optimizer.betas: expected a list, got \"[0.9\" (text)"],
        overrides=["optimizer.betas=[0.9"],
    ),
    Bad(
        "override that gives a key twice",
        ["command line, 'batch={rows: 8, rows: 9}': batch.rows: duplicate key; keep one"],
        overrides=["batch={rows: 8, rows: 9}"],
    ),
    Bad(
        "extends on the command line",
        ["command line, 'extends=b': extends: is allowed in recipe files only"],
        overrides=["extends=b"],
    ),
    Bad(
        "a rule broken by an override",
        [
            "command line, 'mode=lora': mode: `mode: lora` needs a `lora:` section, "
            "such as `lora: {rank: 16, alpha: 32}`"
        ],
        overrides=["mode=lora"],
    ),
    Bad(
        "keys of another loss",
        [
            ":8: objective.label_smoothing: has no effect under `loss: ipo`, only under sigmoid, robust: remove it",
            ":8: objective.margin: has no effect under `loss: ipo`, only under simpo: remove it",
        ],
        {4: PAIRS, 8: "objective: {name: dpo, loss: ipo, label_smoothing: 0.1, margin: 1.0}"},
    ),
    Bad(
        "a reference for a loss without one",
        [
            ":8: objective.reference: has no effect under `loss: simpo`, only under sigmoid, robust, hinge, ipo, "
            "sigmoid_norm, apo_zero, apo_down: remove it"
        ],
        {4: PAIRS, 8: "objective: {name: dpo, loss: simpo, reference: precomputed}"},
    ),
    Bad(
        "more wrong pairs than right ones",
        [
            ":8: objective.label_smoothing: 0.5 says that most pairs are the wrong way round: use less than 0.5, or "
            "swap `chosen` and `rejected` with `columns`"
        ],
        {4: PAIRS, 8: "objective: {name: dpo, loss: robust, label_smoothing: 0.5}"},
    ),
    # --- the reference of a preference ---
    Bad(
        "adapters off without adapters",
        [
            ":8: objective.reference: `adapters_off` needs adapters, and `mode: full` has none: use `precomputed`, or "
            "`mode: lora`"
        ],
        {4: PAIRS, 8: "objective: {name: dpo, reference: adapters_off}"},
    ),
    Bad(
        "adapters off where modules are trained fully",
        [
            ":8: objective.reference: `adapters_off` is not the initial model if modules are trained fully "
            "(lora.modules_to_save: lm_head): use `precomputed`, or name them in `lora.targets` instead"
        ],
        {
            3: "mode: lora",
            4: PAIRS,
            8: "objective: {name: dpo, reference: adapters_off}\nlora: {rank: 16, modules_to_save: [lm_head]}",
        },
    ),
    Bad(
        "another reference, and adapters off",
        [":8: objective.reference_model: has no effect under `reference: adapters_off`: remove one of the two"],
        {
            3: "mode: lora",
            4: PAIRS,
            8: f"objective: {{name: dpo, reference: adapters_off, reference_model: m}}\n{LORA}",
        },
    ),
    Bad(
        "a stream to be computed beforehand",
        [
            ":8: objective.reference: `precomputed` needs all rows before the first step, and a stream has no end: use "
            "`adapters_off`, or `data.streaming: false`"
        ],
        {
            3: "mode: lora",
            4: PAIRS.replace("max_length", "streaming: true, max_length"),
            7: "train: {max_steps: 3}",
            8: f"objective: {{name: dpo}}\n{LORA}",
        },
    ),
    Bad(
        "a stream, all weights trained",
        [
            ":8: objective.reference: `precomputed` needs all rows before the first step, and a stream has no end: use "
            "`data.streaming: false`"
        ],
        {
            4: PAIRS.replace("max_length", "streaming: true, max_length"),
            7: "train: {max_steps: 3}",
            8: "objective: {name: dpo}",
        },
    ),
    Bad(
        "dropout of adapters under a preference",
        [
            ":8: lora.dropout: `objective.name: dpo` compares log-probabilities or scores under equal weights, so "
            "dropout is off (now 0.1): set `lora.dropout: 0`, or `objective.dropout: true` to have it all the same"
        ],
        {3: "mode: lora", 4: PAIRS, 8: "lora: {rank: 16, dropout: 0.1}\nobjective: {name: dpo}"},
    ),
    Bad(
        "a teacher's file and images, which tokens do not tell apart",
        [":8: objective.teacher: a file has its rows by their tokens, which images of one size share: name a model"],
        {4: EVAL.replace("max_length", "image: {}, max_length"), 8: "objective: {name: distill, teacher: m.parquet}"},
    ),
    # --- formats of an objective ---
    Bad(
        "an objective that does not take the format",
        [
            ":4: data.train[0].format: rows of format `messages` are not for `objective.name: dpo`, which takes "
            "`preference` or `comparison` or `ranked`. Fix: set `objective.name` to sft or focal or distill or own"
        ],
        {8: "objective: {name: dpo}"},
    ),
    Bad(
        "pairs for an objective on answers",
        [
            ":4: data.eval[0].format: rows of format `preference` are not for `objective.name: sft`, which takes "
            "`messages` or `sharegpt` or `alpaca` or `prompt_completion` or `speech` or `text` or `tokens`. Fix: set "
            "`objective.name` to dpo or orpo or reward or kto, or train on the chosen answers alone with `format: "
            "prompt_completion` and `columns: {completion: chosen}`"
        ],
        {4: EVAL.replace("b.jsonl, format: messages", "b.jsonl, format: preference")},
    ),
    # --- all at once ---
    Bad(
        "everything at once: the file by line, then the command line",
        [
            ":1: run.sed: unknown key; did you mean `seed`?",
            ':4: data.max_length: expected an integer, got "long" (text)',
            ":6: optimizer.lr: is missing",
            "command line, 'x': expected section.key=value, such as optimizer.lr=1e-4",
            "command line, 'batch.rows=0': batch.rows: expected a number >= 1, got 0",
        ],
        {1: "run: {name: a, sed: 1}", 4: GOOD[3].replace("64", "long"), 6: "optimizer: {}"},
        overrides=["batch.rows=0", "x"],
    ),
]


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_message(bad: Bad, tmp_path: Path):
    lines = dict(enumerate(GOOD, start=1)) | bad.lines
    path = tmp_path / "recipe.yaml"
    path.write_text(bad.text if bad.text is not None else "".join(lines[n] + "\n" for n in sorted(lines)))
    for name, text in bad.files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, bad.overrides)
    printed = [str(problem).replace(f"{path}:", ":").replace(f"{tmp_path}/b", "b") for problem in caught.value.problems]
    assert printed == [problem.replace("{dir}", str(tmp_path)) for problem in bad.problems]
    count = f"{len(printed)} problem{'s' if len(printed) > 1 else ''}"
    assert f": {count}\n" in str(caught.value)  # the title; then every problem, whichever it is, has a line
    assert all(f"\n  {problem}" in str(caught.value) for problem in caught.value.problems)


def test_the_good_one_is_good(tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text("\n".join(GOOD))
    assert load_recipe(path).run.name == "a"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "is a folder, not a recipe file"),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    ],
    ids=["missing", "folder", "unreadable"],
)
def test_file_that_cannot_be_read(make, message: str, tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    make(path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value) == f"{path}: 1 problem\n  {path}: {message}"


def test_file_in_another_encoding(tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes("mode: full\nrun: {name: grün}\n".encode("latin-1"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert [str(problem) for problem in caught.value.problems] == [f"{path}:2: not UTF-8 text"]


@pytest.mark.parametrize(
    ("rows", "rows_per_device", "world_size", "advice"),
    [
        (8, 2, 3, "(2 x 3 = 6); nearest: 6, 12"),
        (
            8,
            4,
            4,
            "(4 x 4 = 16); nearest: 16; or `batch.rows_per_device: 2`",
        ),
    ],
)
def test_divisibility_advice(rows: int, rows_per_device: int, world_size: int, advice: str):
    assert divisibility_message(rows, rows_per_device, world_size).endswith(advice)
