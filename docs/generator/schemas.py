"""Page of the request and response bodies, from the component schemas of the OpenAPI document."""

from docs.generator import markdown
from docs.generator.http_api import document

_INTRO = "Objects in requests and responses of the [HTTP endpoints](http.md).\n\n"


def page() -> str:
    """Return the page."""
    defs = document()["components"]["schemas"]
    text = markdown.header("Request and response bodies", "the models in `app/contracts/schemas`") + _INTRO
    for name, schema in sorted(defs.items()):
        if "properties" not in schema:
            continue
        text += f"## {name}\n\n"
        if "description" in schema:
            text += markdown.escape(schema["description"]) + "\n\n"
        required = schema.get("required", ())
        rows = [
            (
                f"`{field}`",
                markdown.type_text(one, defs, ""),
                "yes" if field in required else "",
                markdown.escape(one.get("description", "")),
            )
            for field, one in schema["properties"].items()
        ]
        text += markdown.table(("field", "type", "required", "meaning"), rows)
    return text.rstrip("\n") + "\n"
