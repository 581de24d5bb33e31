"""Each file by its extension."""

from titanmoe.data.formats import format_of
from titanmoe.data.formats.format import FormatRules


class Auto(FormatRules):
    help = "auto: by extension."

    def file_format(self, extension: str) -> str:
        return format_of(extension)


FORMAT = Auto()
