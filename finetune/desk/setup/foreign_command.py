"""Command lines of other tools: words, as argparse reads them, with the config file that they name.

`trl dpo ...`, `axolotl train FILE ...`, `llamafactory-cli train FILE ...`, and `accelerate launch`, `torchrun`,
`deepspeed` or `python` with a script of theirs, after variables such as CUDA_VISIBLE_DEVICES=0,1.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from finetune.desk.setup.foreign_values import one_line, read_config
from finetune.errors import UserError

COMMAND, LAUNCHER = "command", "launcher"  # keys of the trainer, such as dpo, and of the launcher's options
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "python", "python3")
_TOOLS = {"trl": None, "axolotl": "train", "llamafactory-cli": "train", "lmf": "train"}  # and the word that follows
# Options of `accelerate launch`, torchrun and deepspeed that TRL and axolotl take among their own.
_OF_LAUNCHERS = (
    *("config_file", "accelerate_config", "num_processes", "num_machines", "machine_rank", "main_process_ip"),
    *("main_process_port", "mixed_precision", "multi_gpu", "gpu_ids", "use_deepspeed", "zero_stage", "use_fsdp"),
    *("deepspeed_config_file", "fsdp_version", "fsdp_offload_params", "nproc_per_node", "nnodes", "num_gpus"),
)
_ENDS = (".yaml", ".yml", ".json")
MAX_CHARACTERS = 64 * 1024


def is_command(source: str) -> bool:
    """Returns whether the source is a command line rather than the path of a file."""
    words = source.split()
    return " --" in f" {source}" or (len(words) > 1 and Path(words[0]).name in (*_LAUNCHERS, *_TOOLS))


def command_values(source: str) -> dict[str, Any]:
    """Returns the values of a command line, over those of its config file. Raises UserError."""
    if len(source) > MAX_CHARACTERS:
        raise UserError(f"--from: more than {MAX_CHARACTERS:,} characters. Fix: give the config as a file")
    try:
        words = shlex.split(source.replace("\\\n", " "))
    except ValueError as error:
        reason = str(error).lower().removeprefix("no ")
        raise UserError(f"--from: the command line has no {reason}. Fix: close the quote") from None
    variables = _variables(words)
    words = words[len(variables) :]
    if not words:
        raise UserError("--from: a command line without a command. Fix: give all of it, in quotes")
    name, launcher, rest = _parts(words)
    options, files = _options(rest)
    if "config" in options:
        files.append(str(options.pop("config")))
    launcher = _options(launcher)[0] | {key: options.pop(key) for key in _OF_LAUNCHERS if key in options}
    devices = variables.pop("CUDA_VISIBLE_DEVICES", "").strip(",")
    if devices:
        launcher.setdefault("visible_devices", len(devices.split(",")))
    values: dict[str, Any] = {}
    for file in files:
        values |= read_config(Path(file))
    values |= options
    if name is not None:
        values[COMMAND] = name
    if launcher | variables:
        values[LAUNCHER] = launcher | variables
    return values


def _variables(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        if not re.match(r"[A-Za-z_]\w*=", word):
            break
        name, _, found[name] = word.partition("=")
    return found


def _parts(words: list[str]) -> tuple[str | None, list[str], list[str]]:
    """Returns the trainer or script, the words of the launcher, and those of the tool."""
    program = Path(words[0]).name
    if program in _TOOLS:
        if len(words) < 2 or words[1].startswith("-"):
            raise UserError(f"--from: `{program}` without a command. Fix: give all of it, such as `{program} train`")
        return (words[1] if program == "trl" else None), [], words[2:]
    if program not in _LAUNCHERS:
        if program.endswith(".py"):
            return script_name(program), [], words[1:]
        raise UserError(
            f"--from: `{one_line(program, 40)}` is not a known command. Fix: begin with trl, axolotl, "
            "llamafactory-cli, accelerate, torchrun, deepspeed or python"
        )
    begin = 2 if words[1:2] == ["launch"] else 1
    for i in range(begin, len(words)):
        if words[i].endswith(".py"):
            return script_name(words[i]), words[begin:i], words[i + 1 :]
        if words[i] in ("-m", "--module") and i + 1 < len(words):
            return script_name(words[i + 1].rpartition(".")[2]), words[begin:i], words[i + 2 :]
    raise UserError(f"--from: `{program}` without a script. Fix: give all of it, such as `... sft.py --lr 1e-5`")


def script_name(path: str) -> str:
    """Returns the trainer that a script of TRL or of the alignment handbook is named after.

    >>> script_name("trl/scripts/run_dpo.py"), script_name("reward_modeling.py")
    ('dpo', 'reward')
    """
    stem = Path(path).stem.removeprefix("run_")
    return {"reward_modeling": "reward"}.get(stem, stem)


def _options(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the options and the config files among the words. The last of an option given twice is taken."""
    options: dict[str, Any] = {}
    files: list[str] = []
    i = 0
    while i < len(words):
        word, i = words[i], i + 1
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            while not equals and i < len(words) and not _is_option(words[i]):
                values.append(words[i])
                i += 1
            if len(values) > 1 and values[-1].endswith(_ENDS) and name.replace("-", "_") not in ("config", "datasets"):
                files.append(values.pop())
            key = name.replace("-", "_")
            if values:
                options[key] = _word(values[0]) if len(values) == 1 else [_word(one.rstrip(",")) for one in values]
            else:  # a switch, which `no_` turns off
                options[key.removeprefix("no_")] = not key.startswith("no_")
        elif word.endswith(_ENDS):
            files.append(word)
        elif re.match(r"[A-Za-z_][\w.]*=", word):  # LLaMA-Factory's, over its config
            key, _, value = word.partition("=")
            options[key] = _word(value)
        elif word != "--":
            raise UserError(f"--from: `{one_line(word, 40)}` belongs to no option. Fix: give `--name value`")
    return options, files


def _is_option(word: str) -> bool:
    return word.startswith("--") or re.fullmatch(r"-[A-Za-z]", word) is not None


def _word(text: str) -> Any:
    """Returns a word as text, but for true and false; numbers are read where one is expected."""
    return {"true": True, "false": False}.get(text.lower(), text)
