"""Write every reference page: `python -m docs.generator`."""

from docs.generator.pages import PAGES, REFERENCE


def main() -> None:
    """Write the pages whose text differs from the code."""
    for name, build in PAGES.items():
        path = REFERENCE / name
        text = build()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(REFERENCE.parents[1])}")


if __name__ == "__main__":
    main()
