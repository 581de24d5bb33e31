"""Models that are refused by name: their model_type on Hugging Face, and what they are made of that is not here."""

_CHOSEN_KEYS = "attention to those keys alone that an indexer chooses"
LATER = {
    "deepseek_v32": _CHOSEN_KEYS,
    "deepseek_v4": "attention to compressed keys, several residual streams and experts chosen by hash",
    "glm_moe_dsa": _CHOSEN_KEYS,
    "minimax_m3_vl": _CHOSEN_KEYS,
    "minimax_m3_vl_text": _CHOSEN_KEYS,
    "nemotron_h": "Mamba-2 layers and experts without a gate",
}
