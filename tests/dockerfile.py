"""Parser of Dockerfiles into stages; supports only the syntax that ours uses."""

import json
import re
import shlex
from dataclasses import dataclass, field

_FROM = re.compile(r"(?P<image>\S+)(?:\s+AS\s+(?P<name>\S+))?", re.IGNORECASE)


@dataclass
class Stage:
    """A `FROM` instruction and the instructions after it."""

    name: str
    image: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str | None:
        """Return the argument of the last such instruction, which is the effective one."""
        arguments = [argument for name, argument in self.instructions if name == instruction]
        return arguments[-1] if arguments else None

    @property
    def environment(self) -> dict[str, str]:
        """All `ENV NAME=value`."""
        pairs = [pair for name, argument in self.instructions if name == "ENV" for pair in shlex.split(argument)]
        return dict(pair.split("=", 1) for pair in pairs)

    @property
    def exposed(self) -> set[str]:
        """Ports of all `EXPOSE` instructions."""
        return {port for name, argument in self.instructions if name == "EXPOSE" for port in argument.split()}

    @property
    def command(self) -> list[str]:
        """Default command of a container."""
        return list(json.loads(self.last("CMD") or "[]"))

    @property
    def health_check(self) -> list[str]:
        """Command of the health check."""
        _, _, command = (self.last("HEALTHCHECK") or "").partition("CMD ")
        return list(json.loads(command or "[]"))

    @property
    def copies(self) -> list[tuple[str | None, list[str]]]:
        """Source stage (None for the build context) and source paths of each `COPY`."""
        copies = []
        for name, argument in self.instructions:
            if name == "COPY":
                words = argument.split()
                origin = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
                copies.append((origin, [word for word in words if not word.startswith("--")][:-1]))
        return copies


def read(text: str) -> list[Stage]:
    """Parse the stages of a Dockerfile, in order."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    stages: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, argument = line.strip().partition(" ")
        if name == "FROM":
            match = _FROM.fullmatch(argument.strip())
            assert match, line
            stages.append(Stage(match["name"] or str(len(stages)), match["image"]))
        else:
            stages[-1].instructions.append((name, argument.strip()))
    return stages
