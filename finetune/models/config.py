"""The Hugging Face config of a recipe's model: what can be known of it without its weights, or transformers' models."""

from __future__ import annotations

import difflib
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from finetune.errors import UserError
from finetune.models.tokenizer import first_line
from finetune.recipe.schema import Model


def model_config(model: Model) -> PretrainedConfig:
    """The Hugging Face config of the recipe's model. Raises UserError where there is none."""
    try:
        if model.config is not None:
            _check_config_keys(model.config)
            return AutoConfig.for_model(**model.config)
        assert model.name is not None
        return AutoConfig.from_pretrained(
            model.name, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        where = "model.config" if model.config is not None else f"model.name: {model.name!r}"
        raise UserError(f"{where}: no model config: {first_line(error)}") from error


def _check_config_keys(config: dict[str, Any]) -> None:
    """transformers takes any key in silence; a misspelt one would train another architecture. Raises UserError."""
    known = [*AutoConfig.for_model(config["model_type"]).to_dict(), "rope_theta", "rope_scaling"]
    for name in config:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            raise UserError(f"model.config.{name}: not a setting of {config['model_type']}{hint}")


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Of each layer its config, where a setting such as `head_dim` differs between layers; else the one of them all."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def check_token_ids(config: PretrainedConfig, tokenizer_size: int) -> None:
    """Raises UserError where the tokenizer has ids the embedding table does not."""
    rows = config.get_text_config().vocab_size
    if tokenizer_size > rows:
        raise UserError(
            f"the tokenizer has {tokenizer_size} tokens, the model's embedding {rows} rows: "
            "they do not belong together; check `model.tokenizer` and `model.name` or `model.config.vocab_size`"
        )
