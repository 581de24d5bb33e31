"""Token shards, as `titanmoe tokenize` makes them (titanmoe.data.shards)."""

from titanmoe.data.formats.format import FormatRules


class TokenShards(FormatRules):
    help = "tokens: token shards alone."
    tokenized = True


FORMAT = TokenShards()
