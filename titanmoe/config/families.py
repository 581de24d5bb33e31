"""The model families, in the order in which they are listed. A new one is a file and a line here."""

NAMES = (  # each a file of that name in titanmoe/models/families
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "llama3_moe",
    "deepseek_v3",
    "olmoe",
    "gpt_oss",
)
