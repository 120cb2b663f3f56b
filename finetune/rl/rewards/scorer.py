"""`reward_model`: the score of a model trained by `objective.name: reward`, in batches, in this process.

A process of its own would hold a second context of the device and a second copy of torch for nothing: this is our own
code, which needs no time limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from finetune.data.formats.messages import read_message
from finetune.data.samples import BadRow, Conversation, Message, PromptCompletion
from finetune.errors import UserError
from finetune.recipe.reward_settings import ModelReward
from finetune.release.inference.score import Scorer, load_scorer
from finetune.rl.rewards.completion import Completion, Outcome


class ScoringModel:
    """The reward model of a recipe. Raises UserError for a folder without one."""

    def __init__(self, settings: ModelReward, place: str):
        folder = Path(settings.reward_model).expanduser()
        try:
            self._scorer: Scorer = load_scorer(folder)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        if self._scorer.is_classifier:
            labels = ", ".join(self._scorer.labels)
            raise UserError(
                f"{place}: {folder} is a classifier ({labels}). Fix: use a model of `objective.name: reward`"
            )

    def outcomes(self, completions: Sequence[Completion]) -> list[Outcome]:
        rendered, outcomes = {}, list[Outcome]()
        for i, completion in enumerate(completions):
            try:
                conversation = PromptCompletion(completion.prompt, completion.text)
                if completion.messages:
                    turns = [read_message(message, f"messages[{j}]") for j, message in enumerate(completion.messages)]
                    conversation = Conversation((*turns, Message("assistant", completion.text)))
                examples = self._scorer.renderer.draw(conversation)
                if len(examples) > 1:
                    raise BadRow("the model's chat template rewrites history, so this conversation is several texts")
                rendered[i] = examples[0][0]
                outcomes.append(Outcome(0.0))
            except BadRow as error:
                outcomes.append(Outcome(None, "unanswerable", str(error)))
        if rendered:
            tokens = self._scorer.renderer.tokenize(list(rendered.values()))
            scores = self._scorer.scores([of_sequence[0] for of_sequence in tokens])[:, 0].tolist()
            for i, score in zip(rendered, scores, strict=True):
                is_finite = math.isfinite(score)
                outcomes[i] = Outcome(score) if is_finite else Outcome(None, "not_a_number", f"the score is {score}")
        return outcomes
