"""The tested table: architectures whose engine output equals Hugging Face `generate`, token for token.

An architecture is entered when a tiny random model of it is in `tests/runtime/test_families.py` and passes there with
whole prompts and with prompts cut small and mixed with running requests.
"""

PROVEN: frozenset[str] = frozenset(
    {
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GPT2LMHeadModel",
        "MixtralForCausalLM",
        "GptOssForCausalLM",
    }
)
