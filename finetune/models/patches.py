"""Every replacement of a module's forward or class and every changed attribute of a library: what, when and why.

A forward or a class is changed on one instance. Names of parameters, `isinstance` and saved files stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# (what is changed, why it is not done otherwise), in the order of a run: a later one finds a module as the earlier ones
# left it.
PATCHES: dict[str, tuple[str, str]] = {
    # --- trials of tiny models
    "no ZeRO-3": (
        "transformers' weak reference to DeepSpeed's config, during a trial",
        "transformers would shard a tiny model over the ranks when it is built",
    ),
    "no GPU kernels": (
        "transformers' `is_torchdynamo_exporting`, during a trial",
        "only in an export does it use plain torch if fla, causal_conv1d or mamba_ssm are installed, for GPUs alone",
    ),
    "text models": (
        "the auto class of causal models, for configs of text parts that it does not have",
        "its `register` has no effect for transformers' own configs (5.17)",
    ),
    "name of the body": (
        "`base_model_prefix` of a text part's class",
        "for Llama 4 and Llama 3.2 Vision it is the attribute's name in the multimodal base",
    ),
    # --- load_model
    "own class": (
        "a model that was read in part, by a subclass that has only some layers before its weights are read",
        "it is saved, sharded and looked up by its class",
    ),
    "read conversions": (
        "`_weight_conversions` of a loaded model",
        "saving reverts all of them, and only those that were used, of tensors of the model, can be reverted",
    ),
    "packed model": (
        "`is_loaded_in_4bit` of a model of 4-bit weights",
        "transformers sets it if it packs weights itself, and peft chooses its layers by it",
    ),
    "packed product": (
        "a linear layer of 8-bit weights, with `quantization.compute: scaled`",
        "the product itself is another; the layer is created as for `compute: dequantised`",
    ),
    "stored experts": (
        "attributes of a module of experts whose weights are in the bytes of its files, and its forward",
        "a parameter of theirs has the bytes of its experts, and only these say how they are unpacked",
    ),
    "rotations per document": (
        "rotary modules whose frequencies depend on the length of a sequence",
        "it runs once for each document of a row, which hooks cannot do",
    ),
    "mixer per document": (
        "modules that mix tokens by something else than attention",
        "it runs once for each document of a row, or for several of like length",
    ),
    "no repacking": (
        "`support_avx512bf16_for_cpu` of bitsandbytes' layers",
        "one evaluation on such a CPU would repack weights, `train()` would not undo it, and gradients would be wrong",
    ),
    "names as given": (
        "peft's conversion of module names of older transformers, while adapters are made",
        "it takes dense layers and shared experts for the routed ones, and adapts routers (0.20 and 0.21)",
    ),
    "tied adapters": (
        "`_tied_weights_keys` of a model with adapters or added rows",
        "`tie_weights`, which FSDP2's wrapping calls again, must find where peft or we have put a tied weight",
    ),
    "added rows": (
        "embedding and head of a model with adapters, whose added tokens train",
        "the output is put together from two matrices; both stay the module's own, for backends that gather by module",
    ),
    # --- before the engine wraps the model, in this order
    "dropout of a layer": (
        "`__call__` of decoder layers, if a model drops at random",
        "hooks run again when a layer is recomputed, and inside of what torch compiles",
    ),
    "experts' type": (
        "stacked experts under autocast, which grouped products ignore",
        "its weights are cast inside of it, and no hook changes what a forward reads from `self`",
    ),
    "input types": (
        "`cast_input_dtype_enabled` of peft's layers under autocast",
        "peft's cast to the adapter's fp32, which autocast undoes, is two more passes over the hidden states",
    ),
    "trained product in 8 bits": (
        "linear layers with `train.precision: fp8`, after torchao has converted them",
        "torchao's forward reads CUDA's autocast alone, and rounds weights otherwise than FSDP2",
    ),
    "fused adapter": (
        "peft's linear layers with LoRA, on packed weights as well; after the layers above, which it multiplies by",
        "the product with the weight and those with the adapter are one autograd function",
    ),
    "grouped adapter": (
        "peft's wrappers around stacked experts, and these experts, after `experts' type`",
        "peft adds adapters to the weights of all experts, which a product with those of each row does without",
    ),
    "fused norm": (
        "norms whose formula is known, with `model.kernels`",
        "one kernel takes the place of the whole forward",
    ),
    "fused gate": (
        "feed-forwards gated by silu, with `model.kernels`",
        "the activation and the product between its linear layers are one function",
    ),
    "fused rotation": (
        "attention layers that turn queries and keys, with `model.kernels`",
        "the same forward with another `apply_rotary_pos_emb`, which it reads from its file",
    ),
    "type of images": (
        "`inputs_merger` of SmolVLM and Idefics 3",
        "transformers 5.17 puts features in autocast's type among embeddings in fp32, which needs a cast",
    ),
    "clip by clip": (
        "towers of Gemma 3n, Granite Speech and Phi-4 multimodal, and `_no_split_modules` of their models",
        "it runs once for each clip, within its own call, around which backends gather weights",
    ),
    "scores in fp32": (
        "the head of a sequence classification model",
        "the product runs in another type, outside of autocast",
    ),
    "losses in the head": (
        "the LM head, which then is given targets and returns their losses",
        "backends gather weights around a module's own forward, once for all chunks of the logits",
    ),
    # --- in the engine, before parameters are sharded
    "part of the vocabulary": (
        "embeddings of a tensor parallel model",
        "a rank has the rows of some tokens; the module stays itself, with its own scale and added rows",
    ),
    "own tokens": (
        "decoder layers of a tensor parallel model, whose ranks have some of the tokens between matrices",
        "what is taken and gathered is outside of a layer's recomputation, and its row's length must be known within",
    ),
    "row parallel": (
        "linear layers with a rank's columns of their weight",
        "the bias is added after the sum over ranks, so no hook on the output will do",
    ),
    "DoRA of shards": (
        "the magnitudes of peft's layers with DoRA whose matrices are sharded",
        "the norms inside of it need the columns of other ranks, and peft calls layers for them, which communicate",
    ),
    "sharded dropout": (
        "the dropout of an adapter with a rank's features",
        "the mask is drawn in another size than the input has",
    ),
    "experts of this rank": (
        "stacked experts under expert parallel, in place of `experts' type`: FSDP2 gathers weights in the compute type",
        "the model's own forward is called on the rows that arrive here, with other weights, not on its inputs",
    ),
    "adapters of all experts": (
        "peft's wrappers around those experts",
        "they would add the adapters of all experts to the weights of all",
    ),
    # --- of the planner
    "unpacked product": (
        "packed linear layers on `meta`",
        "kernels of packed products have no shapes without a device",
    ),
}


def replace_forward(module: Any, forward: Callable[..., Any], patch: str) -> None:
    """Replace the forward of one module. patch: its row in `PATCHES`."""
    set_attribute(module, "forward", forward, patch)


def replace_class(module: Any, kind: type, patch: str) -> None:
    """Replace the class of one instance by another with the same state, as FSDP2 itself does."""
    set_attribute(module, "__class__", kind, patch)


def mix_in(module: Any, mixin: type, patch: str) -> None:
    """Put a class before that of one instance, unless it has it already; the name of the class stays."""
    if not isinstance(module, mixin):
        replace_class(module, _mixed(mixin, type(module)), patch)


@cache
def _mixed(mixin: type, kind: type) -> type:
    """Returns one class for all instances: with one for each, torch.compile would compile each layer again."""
    return type(kind.__name__, (mixin, kind), {})


def set_attribute(target: Any, name: str, value: Any, patch: str) -> None:
    """Set an attribute of another library's object. patch: its row in `PATCHES`."""
    assert patch in PATCHES
    setattr(target, name, value)


@contextmanager
def attribute_set(target: Any, name: str, value: Any, patch: str) -> Iterator[None]:
    """Sets an attribute of another library's object for a while."""
    before = getattr(target, name, None)
    set_attribute(target, name, value, patch)
    try:
        yield
    finally:
        set_attribute(target, name, before, patch)
