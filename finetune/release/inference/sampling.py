"""Sampling options of `generate` and `chat`. No heavy imports: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Sampling options; None: the model's generation config decides."""

    max_new_tokens: int = 256
    temperature: float = 0.0  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None  # 0: all tokens
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()  # texts that end an answer, excluded from it

    def check(self) -> Sampling:
        """Raises UserError for options that would have no effect."""
        drawn = {"--top-p": self.top_p, "--top-k": self.top_k, "--seed": self.seed}
        if not self.temperature and (given := [name for name, value in drawn.items() if value is not None]):
            raise UserError(f"{given[0]}: greedy answers are not drawn. Fix: give --temperature, such as 0.7")
        if "" in self.stop:
            raise UserError("--stop: an empty text would end every answer. Fix: give a text, or leave it out")
        return self
