"""The reference page of all options: ``python -m penstock.config.docs > docs/configuration.md``.

``python -m penstock.config.docs vllm`` prints the tables of options in docs/moving-from-vllm.md,
``vllm-fields`` in its place those of fields of requests, ``vllm-methods``, ``vllm-modules`` and
``vllm-routes`` those of methods, modules and routes.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Mapping

from penstock.config.engine import all_options
from penstock.config.eplb import EplbSettings
from penstock.config.kv_events import KVEventsSettings
from penstock.config.options import Option, options_of
from penstock.config.ray_serve import RayServeConfig
from penstock.config.sampling import sampling_options
from penstock.config.server import ServerConfig
from penstock.config.speculative import SpeculativeSettings
from penstock.config.vllm_methods import METHODS
from penstock.config.vllm_names import NOT_NEEDED, NOT_SUPPORTED, ForeignOption
from penstock.config.vllm_routes import ROUTES
from penstock.protocol import vllm_fields
from penstock.protocol.vllm_fields import ForeignField
from penstock.protocol.vllm_modules import MODULES

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m penstock.config.docs > docs/configuration.md`; edit the dataclasses. -->

An engine option has one name everywhere: `--max-model-len 2048` on the command line is
`LLM(max_model_len=2048)` in Python and `max-model-len: 2048` (or `max_model_len`) in the file that
`--config file.yaml` names. Flags take precedence over the file. Sizes can be written as `4GiB`. To
turn off a flag that is on by default, add `no-`: `--no-enable-prefix-caching`. To give a list,
repeat the flag. A key of a JSON object can be a flag of its own:
`--speculative-config.method ngram`.
"""

_SPECULATIVE = """\
Keys of `speculative_config`. [Speculative decoding](speculation.md) says which method to use when.
"""

_KV_EVENTS = """\
Keys of `kv_events_config`. [Scaling](scaling.md#external-load-balancers) describes the events.
"""

_EPLB = """\
Keys of `eplb_config`. [Scaling](scaling.md#load-balancing-of-experts) describes it.
"""

_TITLES = {"lora": "LoRA", "kv_events": "KV events"}

_SERVER = """\
## Server

Flags of `penstock serve`, in addition to the engine's, and keys of its `--config` file.
"""

_RAY_SERVE = """\
## Ray Serve

Arguments of the [Ray Serve application](scaling.md#ray-serve), in addition to the engine's and the
server's.
"""

_SAMPLING = """\
## Sampling parameters

Arguments of `SamplingParams(...)`, and flags of `penstock generate` and `penstock chat` where they
make sense there. `penstock generate --help` shows which, and the commands' own `--max-tokens`.
"""


def render() -> str:
    """The whole page as Markdown."""
    parts = [_INTRODUCTION]
    for section, options in all_options().items():
        title = _TITLES.get(section, section.capitalize())
        parts.append(f"## {title}\n\n{_table(options)}")
        if section == "speculative":
            parts.append(
                _SPECULATIVE + "\n" + _table(options_of(SpeculativeSettings), "speculative_config.")
            )
        if section == "parallel":
            parts.append(_EPLB + "\n" + _table(options_of(EplbSettings), "eplb_config."))
        if section == "kv_events":
            parts.append(
                _KV_EVENTS + "\n" + _table(options_of(KVEventsSettings), "kv_events_config.")
            )
    parts.append(_SERVER + "\n" + _table(options_of(ServerConfig)))
    parts.append(_RAY_SERVE + "\n" + _table(options_of(RayServeConfig)))
    parts.append(_SAMPLING + "\n" + _table(sampling_options()))
    return "\n".join(parts)


def render_vllm_names() -> str:
    """The tables of vLLM's options that are not options here."""
    return _foreign_tables("option", NOT_NEEDED, NOT_SUPPORTED)


def render_vllm_fields() -> str:
    """The tables of vLLM's fields of requests that are not fields here."""
    tables = _foreign_tables("field", vllm_fields.NOT_NEEDED, vllm_fields.NOT_SUPPORTED)
    rows = [
        f"| `{name}` of `{owner}` | {text} |\n"
        for owner, texts in vllm_fields.BY_OWNER.items()
        for name, text in texts.items()
    ]
    return tables + "".join(rows)


def render_vllm_methods() -> str:
    """The table of vLLM's methods that are not methods here."""
    rows = [f"| `{name}` | {text} |" for name, text in METHODS.items()]
    return "\n".join(["| method | |", "|---|---|", *rows]) + "\n"


def render_vllm_routes() -> str:
    """The table of vLLM's routes that are not routes here."""
    rows = [f"| `{path}` | {text} |" for path, text in ROUTES.items()]
    return "\n".join(["| route | |", "|---|---|", *rows]) + "\n"


def render_vllm_modules() -> str:
    """The table of vLLM's modules that are not modules here."""
    rows = [f"| `vllm.{name}` | {text} |" for name, text in MODULES.items()]
    return "\n".join(["| module | |", "|---|---|", *rows]) + "\n"


def _foreign_tables(
    kind: str,
    not_needed: Mapping[str, ForeignOption | ForeignField],
    not_supported: Mapping[str, ForeignOption | ForeignField],
) -> str:
    parts = []
    for title, names in (("not needed", not_needed), ("not supported", not_supported)):
        rows = [f"| `{name}` | {foreign.text} |" for name, foreign in names.items()]
        table = [f"### {kind.capitalize()}s {title}", "", f"| {kind} | |", "|---|---|", *rows]
        parts.append("\n".join(table) + "\n")
    return "\n".join(parts)


def _table(options: Iterable[Option], prefix: str = "") -> str:
    rows = ["| option | type | default | |", "|---|---|---|---|"]
    for declared in options:
        cells = (f"`{prefix}{declared.name}`", _type(declared), _default(declared), declared.help)
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _type(declared: Option) -> str:
    if declared.choices:
        return ", ".join(f"`{choice}`" for choice in declared.choices)
    if issubclass(declared.type, enum.Enum):
        return ", ".join(f"`{member.name}`" for member in declared.type)
    name = "size" if declared.name.endswith("_bytes") else declared.type.__name__
    return f"list of {name}" if declared.is_list else name


def _default(declared: Option) -> str:
    match declared.default:
        case None | []:
            return ""
        case enum.Enum() as member:
            return f"`{member.name}`"
        case value:
            return f"`{value}`"


if __name__ == "__main__":
    pages = {
        "vllm": render_vllm_names,
        "vllm-fields": render_vllm_fields,
        "vllm-methods": render_vllm_methods,
        "vllm-modules": render_vllm_modules,
        "vllm-routes": render_vllm_routes,
    }
    print(pages.get(sys.argv[-1], render)(), end="")
