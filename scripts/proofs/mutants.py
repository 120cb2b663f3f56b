"""Wrong lines, put into a copy of the package one at a time: the tests named with each have to fail.

    python scripts/proofs/mutants.py                        # every one; a line for each, and which test caught it
    python scripts/proofs/mutants.py --only objectives z0   # names or topics that contain one of the words

The tests are run on the unchanged copy first, so that a failure is the wrong line's. Exit status 1 if a mutant
survives, if its line is not in the file exactly once, or if tests fail without it.

pytest runs in forks of this process, which has imported the large libraries, never the package itself.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")  # read by what is imported next

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    topic: str
    name: str  # what is wrong
    file: str
    old: str  # in the file exactly once
    new: str
    # Arguments of pytest, of which one test has to fail; or a script with its arguments, which has to exit with 1.
    tests: tuple[str, ...]


_OBJECTIVE, _PREFERENCE = "finetune/objectives/objective.py", "finetune/objectives/preference.py"
_FORMULAS = "tests/unit/objectives/test_preference.py"
_SHARED = "tests/numerics/test_shared_prompts.py"
_FAKE_CUDA = "tests/fake_cuda/test_fake_cuda.py"
_EPOCHS, _FLIPS = "tests/unit/data/test_data_epochs.py", "tests/unit/data/test_data_flips.py"
_PARITY = "scripts/proofs/parity_matrix.py"
_ROLLOUTS = "tests/distributed/test_rollouts.py"
_GROUPED = "tests/numerics/test_grouped_experts.py"
_ENVIRONMENTS = "tests/distributed/test_environments.py"
_HEAD, _LOSS = "tests/numerics/test_head.py", "finetune/models/head/token_loss.py"
MUTANTS = (
    Mutant(
        "rollouts",
        "the noise of samples depends on the rank",
        "finetune/rollouts/drawing.py",
        "sample_keys(self.seed, draws, samples)",
        "sample_keys(self.seed + self.engine.rank, draws, samples)",
        (_ROLLOUTS, "-k", "alike and fsdp2"),
    ),
    Mutant(
        "rollouts",
        "the noise of a token depends on the padding before it",
        "finetune/rollouts/decoding.py",
        "choose(output.logits[:, -1], position)",
        "choose(output.logits[:, -1], mask.shape[1])",
        (_ROLLOUTS, "-k", "decoded_together"),
    ),
    Mutant(
        "rollouts",
        "recorded rollouts are drawn again after a kill",
        "finetune/rollouts/step_rows.py",
        "if found is not None and found[1] == self._identity:",
        "if found is not None and found[1] != self._identity:",
        (_ROLLOUTS, "-k", "after_a_kill"),
    ),
    Mutant(
        "rollouts",
        "mean of means: of the samples of each micro-batch",
        "finetune/objectives/policy.py",
        "Term(outputs.total, loss.unit, 1.0)",
        "Term(outputs.total / max(1, len(batch.sequence_tokens)), loss.unit, 1.0)",
        ("tests/numerics/test_policy_losses.py", "-k", "dapo"),
    ),
    Mutant(
        "rollouts",
        "mean of means: of the clipped tokens of each micro-batch",
        "finetune/objectives/policy.py",
        "Term(-surrogate.sum()",
        "Term(-surrogate.mean()",
        ("tests/unit/objectives/test_policy.py", "-k", "is_its_formula"),
    ),
    Mutant(
        "rollouts",
        "stale weights in the sampler: samples are of the initial weights",
        "finetune/rollouts/step_rows.py",
        "drawn = self._draw(first,",
        'with self._passes["initial"].changed():\n            drawn = self._draw(first,',
        (_ROLLOUTS, "-k", "weights_that"),
    ),
    Mutant(
        "rollouts",
        "samples are of weights one batch older than the recipe says",
        "finetune/rollouts/step_rows.py",
        "self._staleness = recipe.rollouts.staleness",
        "self._staleness = recipe.rollouts.staleness + 1",
        (_ROLLOUTS, "-k", "weights_that"),
    ),
    Mutant(
        "rollouts",
        "old log-probabilities are of the weights that a step begins with",
        "finetune/objectives/policy.py",
        "old = batch.target_columns.get(OLD, log_probs.detach())",
        "old = log_probs.detach()",
        ("tests/unit/objectives/test_policy.py", "-k", "is_its_formula"),
    ),
    Mutant(
        "rollouts",
        "gathered weights of the reference stay in the last layers",
        "finetune/engine/fsdp2.py",
        "                module.reshard()\n\n    def gathered",
        "                pass\n\n    def gathered",
        (_ROLLOUTS, "-k", "older_samples_and_a_reference and fsdp2"),
    ),
    Mutant(
        "rollouts",
        "a reward's exception is taken as 0",
        "finetune/rewards/scoring.py",
        "if outcome is None or (outcome.value is None and settings.on_failure is None):",
        "if outcome is None:",
        ("tests/unit/rewards/test_reward_children.py::test_the_first_failure_stops_the_run",),
    ),
    Mutant(
        "rollouts",
        "tokens that an environment wrote are trained",
        "finetune/rollouts/records.py",
        "mask = np.full(len(self.ids), self.turns is None)",
        "mask = np.full(len(self.ids), True)",
        (_ENVIRONMENTS, "-k", "turns_stay"),
    ),
    Mutant(
        "rollouts",
        "turns are tokenized again before the next one",
        "finetune/rollouts/episodes.py",
        "[*one.prompt, *one.ids]",
        "self.episodes._renderer.renderer.tokenizer.encode("
        "self.episodes._renderer.renderer.tokenizer.decode([*one.prompt, *one.ids]), add_special_tokens=False)",
        (_ENVIRONMENTS, "-k", "turns_stay"),
    ),
    Mutant(
        "rollouts",
        "the noise of every turn begins anew",
        "finetune/rollouts/drawing.py",
        "sample_keys(self.seed, draws, samples), begun)",
        "sample_keys(self.seed, draws, samples))",
        (_ENVIRONMENTS, "-k", "turns_stay"),
    ),
    Mutant(
        "rollouts",
        "an environment that fails ends a sample without a word",
        "finetune/rollouts/episodes.py",
        'if self._settings.on_failure == "stop":',
        "if False:",
        (_ENVIRONMENTS, "-k", "counted_and_told"),
    ),
    Mutant(
        "objectives",
        "mean of means: of the pairs of each micro-batch",
        _PREFERENCE,
        "settings).sum(), ",
        "settings).mean(), ",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "mean of means: NLL of the chosen answers by pairs",
        _PREFERENCE,
        '"first_target_tokens")',
        '"examples")',
        (f"{_FORMULAS}::test_the_sft_term_is_over_the_chosen_tokens_of_the_step",),
    ),
    Mutant(
        "objectives",
        "mean of means: by the counts of a micro-batch",
        "finetune/training/trainer.py",
        "objective.loss(terms, self.counts)",
        "objective.loss(terms, batch.counts)",
        ("tests/unit/training/test_auto_batch.py::test_the_maths_does_not_change",),
    ),
    Mutant(
        "objectives",
        "shift by one: a place is trained on its own token",
        "finetune/data/batch.py",
        "input_ids[trained].astype",
        "input_ids[trained - 1].astype",
        (f"{_FORMULAS}::test_a_pair_equals_its_reference_before_the_first_step",),
    ),
    Mutant(
        "objectives",
        "shift by one: the second answer of a shared prompt one place later",
        "finetune/data/batch.py",
        "np.concatenate((before[:prefix], own)) if prefix",
        "np.concatenate((before[:prefix] - 1, own)) if prefix",
        (f"{_SHARED}::test_losses_and_gradients_are_those_of_whole_sequences",),
    ),
    Mutant(
        "objectives",
        "label smoothing ignored",
        _PREFERENCE,
        "return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)",
        "return -logsigmoid(margin)",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "torn pair: one answer is left if both are too long",
        "finetune/data/tokenizing.py",
        'counts["dropped_overlong"] += 1',
        'counts["dropped_overlong"] += 1\n        yield replace(example, sequences=example.sequences[:1])',
        ("tests/unit/data/test_bad_pairs.py::test_an_answer_that_is_too_long_takes_its_pair_along",),
    ),
    Mutant(
        "objectives",
        "torn pair: the chosen answer of one against the rejected of another",
        _PREFERENCE,
        "per_sequence.view(-1, 2).unbind(1)",
        "per_sequence.view(2, -1).unbind(0)",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "reference with dropout",
        "finetune/engine/base.py",
        "self.model.eval()",
        "pass",
        ("tests/e2e/test_reference_runs.py::test_dropout_only_where_asked",),
    ),
    Mutant(
        "objectives",
        "policy with dropout that the recipe does not ask for",
        "finetune/models/config.py",
        "return without_dropout(config) if recipe.drops_nothing else config",
        "return config",
        ("tests/e2e/test_reference_runs.py::test_dropout_only_where_asked",),
    ),
    Mutant(
        "objectives",
        "lengths with what is not trained",
        _OBJECTIVE,
        "torch.tensor(batch.sequence_targets, dtype=torch.float64)",
        "torch.tensor(batch.sequence_tokens, dtype=torch.float64)",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "lengths with padding: all of a row as long as its longest answer",
        _OBJECTIVE,
        "return token_ranks.sum(local.to(batch.targets.ids.device, non_blocking=True))",
        "return token_ranks.sum(local.max() + 0 * local)",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "z0 per rank",
        "finetune/training/evaluation.py",
        "return Sums(engine.ranks.total(sums.totals, sums.largest), sums.terms, counts)",
        "ranks = engine.accelerator.num_processes\n"
        "    return Sums({name: total.cpu() * ranks for name, total in sums.totals.items()}, sums.terms, counts)",
        (_PARITY, "--only", "ddp", "x2", "full kto"),
    ),
    Mutant(
        "objectives",
        "z0 per micro-batch",
        "finetune/objectives/kto.py",
        "kl = batch.columns[MISMATCHED].clamp(min=0)",
        "kl = mismatched.detach().mean().clamp(min=0)",
        (f"{_FORMULAS}::test_kto_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "z0 below 0",
        "finetune/objectives/kto.py",
        "batch.columns[MISMATCHED].clamp(min=0)",
        "batch.columns[MISMATCHED]",
        (f"{_FORMULAS}::test_kto_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "IPO of sums",
        _PREFERENCE,
        "PairLoss(ipo, averages=True)",
        "PairLoss(ipo)",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "margin of a reward added",
        "finetune/objectives/scores.py",
        "chosen - rejected - batch.columns.get(MARGIN, 0.0)",
        "chosen - rejected + batch.columns.get(MARGIN, 0.0)",
        ("tests/unit/objectives/test_scores.py::test_a_reward_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "the second answer's positions go on behind the first",
        "finetune/data/batch.py",
        "np.concatenate([np.arange(length) for length in sizes.lengths])",
        "np.arange(sum(sizes.lengths))",
        (f"{_SHARED}::test_losses_and_gradients_are_those_of_whole_sequences",),
    ),
    Mutant(
        "gpu",
        "offloaded shards say the device that they were made on",
        "finetune/engine/sharding.py",
        "return dtensor.to(shard_device)",
        "return dtensor",
        (f"{_FAKE_CUDA}::test_a_config_on_devices[fsdp2_offload-2-full-0]", "--all"),
    ),
    Mutant(
        "gpu",
        "a wait for the device in each forward: transformers looks for documents itself",
        "finetune/objectives/forward.py",
        "**with_unread_mask(attention, ids.device),",
        "**attention,",
        ("tests/numerics/test_waits_and_casts.py::test_a_micro_batch_waits_for_nothing[llama]",),
    ),
    Mutant(
        "gpu",
        "steps in the backward of offloaded shards with a torch that does not wait for gradients",
        "finetune/engine/start.py",
        'TorchVersion(torch_version) < "2.13"',
        'TorchVersion(torch_version) < "2.0"',
        ("tests/unit/engine/test_cuda.py::test_steps_in_the_backward_of_offloaded_shards_need_a_torch_that_waits",),
    ),
    Mutant(
        "gpu",
        "bf16 on a GPU that emulates it",
        "finetune/engine/start.py",
        "is_bf16_supported(including_emulation=False)",
        "is_bf16_supported()",
        ("tests/unit/engine/test_cuda.py::test_a_gpu_that_emulates_bf16_has_none",),
    ),
    Mutant(
        "gpu",
        "all gathers of the result are queued while rank 0 writes",
        "finetune/engine/fsdp2.py",
        "torch.cuda.current_stream(self.device).synchronize()",
        "pass",
        (f"{_FAKE_CUDA}::test_other_ranks_wait_while_rank_0_writes",),
    ),
    Mutant(
        "gpu",
        "numbers are sent to the device from memory that is not pinned",
        "finetune/utils.py",
        "return tensor.pin_memory().to(device, non_blocking=True) if to_gpu else tensor.to(device)",
        "return tensor.to(device)",
        (f"{_FAKE_CUDA}::test_a_config_on_devices[fsdp2-2-full-1]",),
    ),
    Mutant(
        "gpu",
        "a checkpoint does not wait for its copies",
        "finetune/checkpoints/saver.py",
        "            torch.cuda.synchronize()\n        return copies",
        "            pass\n        return copies",
        (f"{_FAKE_CUDA}::test_a_checkpoint_waits_for_its_copies_once[single-1-full-0]",),
    ),
    Mutant(
        "gpu",
        "autocast keeps a copy of each weight until the end of a forward",
        "finetune/models/wrapped.py",
        "cache_enabled=False",
        "cache_enabled=True",
        ("tests/numerics/test_waits_and_casts.py", "-k", "keeps_no_copy"),
    ),
    Mutant(
        "gpu",
        "a wait in each micro-batch with shared prompts: places of keys from memory that is not pinned",
        "finetune/models/attention/kernels.py",
        "places = copied_to(torch.from_numpy(row_places(document_lengths, prefix_lengths)), device)",
        "places = torch.from_numpy(row_places(document_lengths, prefix_lengths)).to(device)",
        (_FAKE_CUDA, "-k", "orpo"),
    ),
    Mutant(
        "gpu",
        "casts of adapters outlive their step",
        "finetune/models/casts.py",
        "before, _kept = _kept, {}",
        "before = _kept = _kept or {}",
        ("tests/numerics/test_lora_linear.py", "-k", "share_one_cast"),
    ),
    Mutant(
        "gpu",
        "each layer is compiled by itself: fused layers have a class each",
        "finetune/models/patches.py",
        "@cache\ndef _mixed",
        "def _mixed",
        ("tests/numerics/test_lora_linear.py", "-k", "in_one_graph"),
    ),
    Mutant(
        "gpu",
        "a likely token's gradient is rounded before 1 is subtracted",
        _LOSS,
        "torch.exp(log_p, out=out).scatter_(1, index, (of_target.exp() - 1).to(out.dtype))",
        "torch.exp(log_p, out=out).scatter_add_(1, index, torch.full_like(of_target, -1.0).to(out.dtype))",
        (_HEAD, "-k", "written_in_16_bits"),
    ),
)


_BATCHES, _ORDER = "tests/unit/data/test_data_batches.py", "tests/unit/data/test_data_order_properties.py"
_TEMPLATES, _CHAT = "tests/unit/data/test_data_templates.py", "tests/unit/data/test_data_chat.py"
_OPTIM, _OPTIMIZERS = "finetune/training/optim.py", "tests/numerics/test_optimizers_and_schedules.py"
_SPANS, _BATCH, _LOADER = "finetune/data/chat/trained_spans.py", "finetune/data/batch.py", "finetune/data/loader.py"
_TOKENS, _ADDED = "finetune/models/added_tokens.py", "tests/numerics/test_added_tokens.py"
_FOLDER = "tests/unit/checkpoints/test_checkpoint_folder.py"
_ATTENTION = "tests/numerics/test_attention.py::test_packed_equals_one_document_at_a_time"
_RESUMED = "tests/e2e/test_resume.py::test_resumed_on_one_process_is_bitwise_the_run_never_stopped"
_PLAIN = "tests/numerics/test_plain_loop.py"
MUTANTS += (
    # --- what is trained, and behind what
    Mutant(
        "masks",
        "the end of turn is not trained",
        _SPANS,
        "end = len(text) - len(traits.closing)",
        "end = len(text) - len(traits.tail)",
        (_TEMPLATES, "-k", "exact and chatml"),
    ),
    Mutant(
        "masks",
        "what follows the end of turn is trained",
        _SPANS,
        "end = len(text) - len(traits.closing)",
        "end = len(text)",
        (_TEMPLATES, "-k", "exact and chatml"),
    ),
    Mutant(
        "masks",
        "the last character of the prompt is trained",
        _SPANS,
        "before = len(written.prompt)",
        "before = len(written.prompt) - 1",
        (_TEMPLATES, "-k", "exact and chatml"),
    ),
    Mutant(
        "masks",
        "the first token is trained",
        "finetune/data/chat/renderer.py",
        "trained[:1] = False",
        "trained[:0] = False",
        (_TEMPLATES, "-k", "ids_are_those and chatml"),
    ),
    Mutant(
        "masks",
        "an empty thought is left out",
        _SPANS,
        "else reasoning) + thought.text",
        "else reasoning)",
        (_TEMPLATES, "-k", "exact and r1_distill"),
    ),
    Mutant(
        "masks",
        "a thought is trained behind the prompt that gives an empty one",
        _SPANS,
        "with_thought = chat.thinking if conversation.messages[i].reasoning else None",
        "with_thought = None",
        (_CHAT, "-k", "empty_thought"),
    ),
    Mutant(
        "masks",
        "a row's template arguments are ignored",
        "finetune/data/chat/template.py",
        "            **self.arguments,\n",
        "",
        (_CHAT, "-k", "arguments_of_a_row"),
    ),
    Mutant(
        "masks",
        "ids of calls are too short for Mistral",
        "finetune/data/chat/template_traits.py",
        "hexdigest()[:9]",
        "hexdigest()[:8]",
        (_TEMPLATES, "-k", "calls_without_ids"),
    ),
    Mutant(
        "masks",
        "only eos_token ends a generation",
        "finetune/data/chat/template_check.py",
        "return last & (added | single_token)",
        "return last & {tokenizer.eos_token_id}",
        (_TEMPLATES, "-k", "end_a_turn"),
    ),
    # --- rows, order, distribution
    Mutant(
        "data",
        "packing loses a document",
        "finetune/data/packing.py",
        "open_rows.place(size, number)",
        "open_rows.place(size, max(1, number - 1))",
        (_ORDER,),
    ),
    Mutant(
        "data",
        "documents of a row are one",
        _BATCH,
        "sequence_lengths=(*layout.own_lengths, *layout.padding),",
        "sequence_lengths=(sum(layout.own_lengths), *layout.padding),",
        (_BATCHES,),
    ),
    Mutant(
        "data",
        "every epoch in the same order",
        "finetune/data/packing.py",
        "(self.seed, epoch), self.work",
        "(self.seed, 0), self.work",
        (_BATCHES,),
    ),
    Mutant(
        "data",
        "every epoch takes the same part of a source",
        "finetune/data/epochs.py",
        "again = self.order[(first + np.arange(rest))",
        "again = self.order[(0 + np.arange(rest))",
        (_EPOCHS,),
    ),
    Mutant(
        "data",
        "as many examples in each epoch, however many that makes",
        "finetune/data/epochs.py",
        "divmod(last - first, count)",
        "divmod(self.position(1), count)",
        (_EPOCHS,),
    ),
    Mutant(
        "data",
        "a partial last epoch takes as much as a whole one",
        "finetune/data/epochs.py",
        "min(epoch + 1, self.epochs or math.inf)",
        "epoch + 1",
        (_EPOCHS,),
    ),
    Mutant(
        "data",
        "large parts of a cache are not verified as they are read",
        "finetune/data/token_cache.py",
        "if not self.is_verified and self.checksum(i)",
        "if False and self.checksum(i)",
        (_FLIPS,),
    ),
    Mutant(
        "data",
        "a step leaves its first row out",
        _LOADER,
        "return range(first, min(first",
        "return range(first + (step > 0), min(first",
        (_BATCHES,),
    ),
    Mutant(
        "data",
        "a micro-batch is run twice, another never",
        _LOADER,
        "rank if i % 2 == 0 else -1 - rank",
        "rank if i % 2 == 0 else 0",
        (_ORDER,),
    ),
    Mutant(
        "data",
        "a dummy batch trains",
        _BATCH,
        "loss_mask=np.zeros_like(shortest.loss_mask)",
        "loss_mask=shortest.loss_mask",
        (_BATCHES,),
    ),
    Mutant(
        "data",
        "a dummy batch counts",
        _BATCH,
        "counts=dict.fromkeys(batch.counts, 0),",
        "counts=batch.counts,",
        (_BATCHES,),
    ),
    Mutant(
        "data",
        "a step counts its last row only",
        _LOADER,
        "counts.update(self.rows.counts(position))",
        "counts = Counter(self.rows.counts(position))",
        (_BATCHES,),
    ),
    # --- attention
    Mutant(
        "attention",
        "a document sees its own future",
        "finetune/models/attention/per_document.py",
        "                is_causal=mask is None,\n",
        "                is_causal=False,\n",
        (_ATTENTION,),
    ),
    Mutant(
        "attention",
        "a window is one token longer",
        "finetune/models/attention/per_document.py",
        "keys <= sliding_window else sliding_window",
        "keys <= sliding_window else sliding_window + 1",
        (_ATTENTION,),
    ),
    Mutant(
        "attention",
        "a token does not see itself",
        "finetune/models/attention/pieces.py",
        "dtype=torch.bool).triu(1)",
        "dtype=torch.bool).triu(0)",
        ("tests/numerics/test_pieces.py",),
    ),
    Mutant(
        "attention",
        "pieces are merged by the larger sum alone",
        "finetune/models/attention/pieces.py",
        "torch.logaddexp(into.lse, part.lse)",
        "torch.maximum(into.lse, part.lse)",
        ("tests/numerics/test_pieces.py",),
    ),
    Mutant(
        "attention",
        "dynamic RoPE remembers longer documents",
        "finetune/models/attention/per_document.py",
        "for prefix in growing:",
        "for prefix in ():",
        ("tests/numerics/test_rope.py",),
    ),
    Mutant(
        "attention",
        "RoPE takes a row for one document",
        "finetune/models/attention/per_document.py",
        "starts = (positions == 0).nonzero()[:, 0].tolist()",
        "starts = [0]",
        ("tests/numerics/test_rope.py",),
    ),
    Mutant(
        "attention",
        "isolation is believed",
        "finetune/models/attention/isolation.py",
        "return self.loss <= LOSS_TOLERANCE and self.gradient <= GRADIENT_TOLERANCE",
        "return True",
        ("tests/numerics/test_isolation.py",),
    ),
    Mutant(
        "attention",
        "a mixer's results are read from behind the padding",
        "finetune/models/attention/mixers.py",
        "range(len(tokens), len(tokens) + length)",
        "range(len(tokens) + longest - length, len(tokens) + longest)",
        ("tests/numerics/test_mixers.py", "-k", "packed_documents_of_a_hybrid and lfm2"),
    ),
    Mutant(
        "attention",
        "tokens of an image see none that follow",
        "finetune/models/attention/per_document.py",
        "enumerate(images) if have[i] >= 0}",
        "enumerate(images) if have[i] < 0}",
        ("tests/numerics/test_images.py", "-k", "packed_documents_with_images and gemma3"),
    ),
    # --- the head's losses and gradients
    Mutant(
        "head",
        "z-loss: half of its gradient",
        _LOSS,
        "gradient.mul_(1 + 2 * self.z_loss * lse)",
        "gradient.mul_(1 + self.z_loss * lse)",
        (_HEAD, "-k", "formula"),
    ),
    Mutant(
        "head",
        "label smoothing has no gradient",
        _LOSS,
        "gradient.sub_(smoothing / logits.shape[1])",
        "gradient.sub_(0.0)",
        (_HEAD, "-k", "formula"),
    ),
    Mutant(
        "head",
        "soft cap: root of its derivative",
        _LOSS,
        ".neg_().add_(1.0))",
        ".neg_().add_(1.0).sqrt_())",
        (_HEAD, "-k", "formula"),
    ),
    Mutant(
        "head",
        "bf16: the gradient of the head is rounded with each chunk",
        "finetune/models/head/chunked.py",
        "grad_weight = torch.empty_like(self.weight, dtype=sum_dtype)",
        "grad_weight = torch.empty_like(self.weight, dtype=compute)",
        (_HEAD, "-k", "bf16"),
    ),
    Mutant(
        "head",
        "weights of tokens: the first one's for all",
        "finetune/models/head/chunked.py",
        "back.mul_(token_gradients[rows, None])",
        "back.mul_(token_gradients[0])",
        (_HEAD, "-k", "weighted"),
    ),
    Mutant(
        "experts",
        "balance is not times the number of experts",
        "finetune/objectives/router_balance.py",
        "losses.append(layer.shape[-1] * ((of_rows",
        "losses.append(((of_rows",
        ("tests/numerics/test_router_balance.py",),
    ),
    Mutant(
        "experts",
        "grouped products: an expert's last row goes to the next one",
        "finetune/models/grouped_experts.py",
        "right=True, out_int32=True)  # (E,), of the rows of each",
        "right=True, out_int32=True).sub(1).clamp_min(0)",
        (_GROUPED, "-k", "as_peft"),
    ),
    Mutant(
        "experts",
        "adapters of experts without tokens have a gradient as the kernel left it",
        "finetune/models/grouped_experts.py",
        ".mul_(ctx.scaling).masked_fill_(idle, 0.0)",
        ".mul_(ctx.scaling)",
        (_GROUPED, "-k", "without_tokens"),
    ),
    Mutant(
        "experts",
        "grouped adapters: the gradient of hidden states leaves out the adapter",
        "finetune/models/grouped_experts.py",
        "            of_rows.add_(grouped_mm(of_inner, a, ends), alpha=ctx.scaling)\n",
        "",
        (_GROUPED, "-k", "as_peft"),
    ),
    Mutant(
        "experts",
        "the trial takes grouped products whatever they compute",
        "finetune/models/experts_trial.py",
        "if distances[worst] <= bound:",
        "if distances[worst] <= 1e9:",
        (_GROUPED, "-k", "wrong_or_missing"),
    ),
    Mutant(
        "experts",
        "expert parallel: every rank computes the first experts' adapters",
        "finetune/engine/expert_parallel.py",
        "first = mesh.get_local_rank() * (",
        "first = 0 * (",
        ("tests/distributed/test_experts.py", "-k", "4-qwen3_moe"),
    ),
    # --- adapters and added tokens
    Mutant(
        "adapters",
        "LoRA is scaled twice",
        "finetune/models/weights.py",
        "lora_alpha=lora.alpha,",
        "lora_alpha=2 * lora.alpha,",
        ("tests/numerics/test_loading.py", "-k", "scaled"),
    ),
    Mutant(
        "adapters",
        "merged without their scale",
        "finetune/export/merging.py",
        "read(b).float() * scale, read(a)",
        "read(b).float(), read(a)",
        (_ADDED, "-k", "alike and llama-added"),
    ),
    Mutant(
        "tokens",
        "a row begins as its first piece",
        _TOKENS,
        "weight[ids].float().mean(0)",
        "weight[ids[:1]].float().mean(0)",
        (_ADDED, "-k", "begins"),
    ),
    Mutant(
        "tokens",
        "rows of the head are not trained",
        _TOKENS,
        "torch.cat([out[..., :low], added, out",
        "torch.cat([out[..., :low], added.detach(), out",
        (_ADDED, "-k", "gradient"),
    ),
    # --- optimizer and schedule
    Mutant(
        "optimizer",
        "weight decay on biases and norms",
        _OPTIM,
        "((True, weight_decay), (False, 0.0))",
        "((True, weight_decay), (False, weight_decay))",
        (_OPTIMIZERS,),
    ),
    Mutant(
        "optimizer",
        "Muon on tables of embeddings that have other names",
        _OPTIM,
        "if len(full_shape(tensor)) == 2) - roles.tables",
        'if len(full_shape(tensor)) == 2 and "embed" not in name)',
        (_OPTIMIZERS,),
    ),
    Mutant(
        "optimizer",
        "Muon orthogonalizes shards under FSDP2",
        "finetune/engine/fsdp2.py",
        "if (muon := muon_of(self.optimizers)) is not None:",
        "if (muon := muon_of([])) is not None:",
        (_PARITY, "--only", "fsdp2", "x2", "full muon"),
    ),
    Mutant(
        "optimizer",
        "Muon's rate by the shape of a part",
        "finetune/engine/muon.py",
        "_update(weight, direction.to(weight.device), matrix.shape, group)",
        "_update(weight, direction.to(weight.device), weight.shape, group)",
        ("tests/distributed/test_muon.py",),
    ),
    Mutant(
        "optimizer",
        "momentum and decay of the tower in a step without an image",
        "finetune/engine/base.py",
        "group.get(OF_IMAGES, False) and not has_images",
        "False",
        ("tests/e2e/test_image_runs.py::test_steps_without_a_picture_leave_tower_and_projector_as_plain_torch_does",),
    ),
    Mutant(
        "optimizer",
        "betas exchanged",
        _OPTIM,
        "betas=recipe.betas, eps=recipe.eps, fused=True",
        "betas=recipe.betas[::-1], eps=recipe.eps, fused=True",
        (_OPTIMIZERS,),
    ),
    Mutant(
        "optimizer",
        "warm-up begins with a rate of 0",
        _OPTIM,
        "return (step + 1) / (warmup + 1)",
        "return step / warmup",
        (_OPTIMIZERS,),
    ),
    Mutant(
        "optimizer",
        "the decay counts the warm-up",
        _OPTIM,
        "progress = (step - warmup) / (steps - warmup)",
        "progress = step / steps",
        (_OPTIMIZERS,),
    ),
    Mutant(
        "optimizer",
        "half of a cosine",
        _OPTIM,
        "math.cos(math.pi * progress)",
        "math.cos(math.pi * progress / 2)",
        (_OPTIMIZERS,),
    ),
    Mutant(
        "optimizer",
        "wsd never reaches its end",
        _OPTIM,
        "(1.0 - schedule.decay_ratio)) / schedule.decay_ratio",
        "(1.0 - schedule.decay_ratio))",
        (_OPTIMIZERS,),
    ),
    Mutant(
        "optimizer",
        "factors of the schedule are multiplied up",
        "finetune/engine/base.py",
        'group["initial_lr"] * lr_factor',
        'group["lr"] * lr_factor',
        (_PLAIN,),
    ),
    Mutant(
        "optimizer",
        "clipped to the limit times the norm",
        "finetune/engine/base.py",
        "self.max_grad_norm / (norm + 1e-6)",
        "self.max_grad_norm",
        (_PLAIN,),
    ),
    Mutant(
        "optimizer",
        "clipped by the last chunk's norm",
        "finetune/engine/optimizer_step.py",
        "cpu_total += torch.dot(wide, wide)",
        "cpu_total = torch.dot(wide, wide)",
        ("tests/numerics/test_norms.py",),
    ),
    Mutant(
        "optimizer",
        "fp16: the loss scale never falls",
        "finetune/engine/optimizer_step.py",
        "self.value, self.good_steps = self.value / 2, 0",
        "self.good_steps = 0",
        ("tests/numerics/test_precision.py", "-k", "loss_scale"),
    ),
    # --- backends
    Mutant(
        "backends",
        "DDP's average is not undone",
        "finetune/engine/ddp.py",
        "scaled = loss * (self.world_size * self.loss_scale.value)",
        "scaled = loss * self.loss_scale.value",
        (_PARITY, "--only", "ddp", "x2", "full tied"),
    ),
    Mutant(
        "backends",
        "DDP: gradients of the step before stay",
        "finetune/engine/ddp.py",
        "torch._foreach_zero_(gradients)",
        "pass",
        (_PARITY, "--only", "ddp", "x2", "full tied"),
    ),
    Mutant(
        "backends",
        "FSDP2's average is not undone",
        "finetune/engine/fsdp2.py",
        "scaled = loss * (sharing * self.loss_scale.value)",
        "scaled = loss * self.loss_scale.value",
        (_PARITY, "--only", "fsdp2", "x2", "full tied"),
    ),
    Mutant(
        "backends",
        "DeepSpeed's average is not undone",
        "finetune/engine/zero.py",
        "self.model.backward(loss * self.world_size, ",
        "self.model.backward(loss, ",
        (_PARITY, "--only", "zero2", "x2", "full tied"),
    ),
    # --- checkpoints and resume
    Mutant(
        "checkpoints",
        "checksums are not compared",
        "finetune/checkpoints/folder.py",
        "if read and sha256_file(path) != entry.sha256:",
        "if read and not entry.sha256:",
        (_FOLDER,),
    ),
    Mutant(
        "checkpoints",
        "sizes are not compared",
        "finetune/checkpoints/folder.py",
        "if path.stat().st_size != entry.bytes:",
        "if entry.bytes < 0:",
        (_FOLDER,),
    ),
    Mutant(
        "checkpoints",
        "parts are put at the beginning of a shard",
        "finetune/checkpoints/shards.py",
        "replace(overlap, at=overlap.at + part.offset)",
        "replace(overlap, at=part.offset)",
        (_FOLDER,),
    ),
    Mutant(
        "checkpoints",
        "a resumed run repeats a step",
        "finetune/training/state.py",
        "state = TrainingState(**resumed.progress)",
        'state = TrainingState(**{**resumed.progress, "step": resumed.progress["step"] - 1})',
        (_RESUMED,),
    ),
    Mutant(
        "checkpoints",
        "a key that the order depends on may change",
        "finetune/checkpoints/resume.py",
        "if fixed or refused:",
        "if fixed:",
        ("tests/unit/checkpoints/test_resume_changes.py",),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words in names or topics")
    parser.add_argument("--json", type=Path, help="the list with what caught each; lines of those not chosen stay")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not arguments.only or any(word in f"{mutant.topic}: {mutant.name}" for word in arguments.only)
    ]
    for library in ("torch", "transformers", "peft"):  # once, for all forks
        importlib.import_module(library)
    with tempfile.TemporaryDirectory(prefix="finetune-mutants-") as name:
        copy = copied(Path(name) / "tree")
        # By the text's hash, not by its time, so that a changed file is compiled again.
        hashed = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(copy / "finetune", quiet=1, invalidation_mode=hashed)
        broken = unchanged_failures(copy, chosen)
        found: list[dict[str, Any]] = []
        for mutant in chosen:
            found.append({**asdict(mutant), "caught_by": caught_by(copy, mutant)})
            if arguments.json:
                write(arguments.json, found)
    survived = [one["name"] for one in found if one["caught_by"] is None]
    print(f"{len(found) - len(survived)} of {len(found)} caught")
    raise SystemExit("\n".join([*broken, *(f"survived: {name}" for name in survived)]) or 0)


def write(file: Path, found: list[dict[str, Any]]) -> None:
    """Writes results in the order of `MUTANTS`, and with them those that the file has of mutants that have not changed
    since."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    results = {(one["topic"], one["name"]): one for one in [*known, *json.loads(json.dumps(found))]}
    mutants = json.loads(json.dumps([asdict(mutant) for mutant in MUTANTS]))
    of_mutants = [(mutant, results.get((mutant["topic"], mutant["name"]))) for mutant in mutants]
    lines = [result for mutant, result in of_mutants if result is not None and result == {**result, **mutant}]
    file.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def copied(folder: Path) -> Path:
    """Returns a copy of the files that git knows of, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for path in filter(None, listed.stdout.splitlines()):
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
    return folder


def unchanged_failures(copy: Path, mutants: list[Mutant]) -> list[str]:
    """Runs the tests of all mutants once on the unchanged copy; returns those that do not pass."""
    every = dict.fromkeys(mutant.tests for mutant in mutants)
    return [f"fails without a mutant: {' '.join(tests)}" for tests in every if run(copy, tests).returncode != 0]


def caught_by(copy: Path, mutant: Mutant) -> str | None:
    """Puts the line in, runs the tests and takes it out again; returns the test that failed."""
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8")
    if (count := text.count(mutant.old)) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.old!r} is {count} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        done = run(copy, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    test = None
    if done.returncode == 1:  # of pytest: tests failed; 2 and more: it could not run them
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        test = failed[1] if failed else " ".join(mutant.tests)
    print(f"{mutant.topic}: {mutant.name}: {'SURVIVED' if test is None else f'caught by {test}'}", flush=True)
    if test is None:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return test


def run(copy: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",  # by time: a line of the same length within a second would not be seen
        "FINETUNE_CACHE": str(copy.parent / "cache"),
    }
    if tests[0].startswith("scripts/"):
        command = [sys.executable, *tests]
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return forked_pytest(copy, ["-n", "0", "-q", "-x", "-p", "no:randomly", *_IMPORTED, *tests], environment)


_IMPORTED = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")  # anyio, by transformers


def forked_pytest(copy: Path, arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            status = 3  # pytest's for an error of its own
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(copy)
                os.environ.update(environment)
                sys.path[0], sys.dont_write_bytecode = str(copy), True
                status = int(pytest.main(arguments))
            finally:  # or it would go on as this script
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, waited = os.waitpid(process, 0)
        output.seek(0)
        return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(waited), output.read(), "")


if __name__ == "__main__":
    main()
