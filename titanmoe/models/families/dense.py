"""Dense models on Hugging Face that can be upcycled: each becomes a MoE model of `family`, with copies of its FFN.

Read by titanmoe.checkpoint.hf.config_json for `titanmoe convert --upcycle`.
"""

from __future__ import annotations

from titanmoe.models.families import huggingface as hf
from titanmoe.models.families import llama3_moe, qwen2_moe, qwen3_moe

_HF_TENSORS = hf.ENDS | hf.layer(hf.NORMS | hf.ATTENTION | hf.DENSE)
_FIELDS = hf.SHAPE | hf.HEADS | {"dense_hidden": ("intermediate_size",)}

DENSE = (
    hf.HuggingFace(
        model_type="llama",
        architecture="LlamaForCausalLM",
        family="llama3_moe",
        switches=llama3_moe.SWITCHES,
        hf_tensors=_HF_TENSORS,
        fields=_FIELDS,
        conversions=(hf.rope(1e4),),
        defaults=hf.DEFAULTS,
        fixed=hf.FIXED | {"attention_bias": False, "mlp_bias": False},
        derived=("rotary_emb.inv_freq",),
        dense=True,
    ),
    hf.HuggingFace(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        family="qwen2_moe",
        switches=qwen2_moe.SWITCHES | dict(qkv_bias=True, shared_gate=False, norm_topk=True),
        hf_tensors=_HF_TENSORS,
        fields=_FIELDS,
        conversions=(hf.rope(1e4), hf.NO_WINDOWS),
        defaults=hf.DEFAULTS | {"num_key_value_heads": 32},
        fixed=hf.FIXED,
        dense=True,
    ),
    hf.HuggingFace(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        family="qwen3_moe",
        switches=qwen3_moe.SWITCHES,
        hf_tensors=_HF_TENSORS,
        fields=_FIELDS,
        conversions=(hf.rope(1e4), hf.NO_WINDOWS),
        defaults=hf.DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
        fixed=hf.FIXED | {"attention_bias": False},
        dense=True,
    ),
)
