"""Types of weights that exports have: those of `--dtype` and `--quantize`."""

from __future__ import annotations

FLOATS = ("float32", "bfloat16", "float16")
EIGHT_BITS = ("int8", "fp8")  # of `--quantize`
GGUF_TYPES = ("f32", "bf16", "f16", "q8_0")  # written here
# llama-quantize's own, with the mean KL in nats that llama.cpp measured for it on Llama 3 8B, with an importance matrix
# if it lists no other (https://github.com/ggml-org/llama.cpp/blob/master/tools/perplexity/README.md). It has none of
# MXFP4, whose values are as far off as those of Q4_0 (`SHARES` in gguf_codes.py).
LLAMA_TYPES = {"q6_k": 0.0055, "q5_k_m": 0.0108, "q5_k_s": 0.0166, "q5_1": 0.0181, "q5_0": 0.0223, "q4_k_m": 0.0313}
LLAMA_TYPES |= {"q4_k_s": 0.0432, "q4_1": 0.0717, "q4_0": 0.072, "q3_k_l": 0.0872, "q3_k_m": 0.102, "q3_k_s": 0.229}
LLAMA_TYPES |= {"q2_k": 0.446, "q2_k_s": 0.404, "iq4_nl": 0.0358, "iq4_xs": 0.0364, "iq3_m": 0.103, "iq3_s": 0.112}
LLAMA_TYPES |= {"iq3_xs": 0.139, "iq3_xxs": 0.184, "iq2_m": 0.326, "iq2_s": 0.44, "iq2_xs": 0.547, "iq2_xxs": 0.813}
LLAMA_TYPES |= {"iq1_m": 1.4, "iq1_s": 2.22, "mxfp4_moe": 0.08}
NEED_IMATRIX = ("iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m", "q2_k_s")  # llama-quantize writes none without one
