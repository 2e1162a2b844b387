"""Base class of wire models that a notebook or a terminal shows in a line."""

from pydantic import BaseModel

_FIRST = ("type", "id", "name", "status")
_LONGEST = 200
_LONGEST_VALUE = 60


class ShortRepr(BaseModel):
    """Model whose `repr` has at most 200 characters: what identifies it, then its first fields that have a value."""

    def __repr__(self) -> str:
        name, fields_text = type(self).__name__, ""
        room = _LONGEST - len(name) - len("(, …)")
        fields = {field: value for field, value in self.__repr_args__() if field}
        first = {field: fields[field] for field in _FIRST if field in fields}
        for field, value in (first | fields).items():
            if value is None or value == [] or value == {} or (field == "run_id" and value == fields.get("id")):
                continue
            text = repr(str(value) if isinstance(value, str) else value)  # of a status, its value alone
            part = f"{field}={text if len(text) <= _LONGEST_VALUE else f'{text[:_LONGEST_VALUE]}…'}"
            if len(fields_text) + len(part) + 2 > room:
                return f"{name}({fields_text}, …)"
            fields_text += f", {part}" if fields_text else part
        return f"{name}({fields_text})"

    def __str__(self) -> str:
        return repr(self)
