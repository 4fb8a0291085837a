"""A program of one's own, as tools read it: the Python file that registers activations and describes its model. The
protocol is two sentences. Importing the file registers what the model needs, and starts nothing. If it has a function
`layers(config, context)` (`DescribesLayers`), that describes the model; otherwise it is a GPT of megacore's."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from megacore.errors import UserError
from megacore.models.gpt import gpt_layers
from megacore.models.spec import DescribesLayers


def layers_of(program: str | Path | None) -> DescribesLayers:
    """What describes the model of a program. `program`: the file, which is executed; None: there is none, and the model
    is a GPT of megacore's. Raises UserError where it cannot be imported, or its `layers` is no function."""
    if program is None:
        return gpt_layers
    path = Path(program).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.suffix == ".py" and path.is_file() else None
    if spec is None or spec.loader is None:
        raise UserError(f"--program {program} is no Python file: give the file that trained the model, such as my.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent))  # as of the script that Python starts
    try:
        spec.loader.exec_module(module)
    except SystemExit:
        raise UserError(
            f'--program {program} ends when it is imported: start the training under if __name__ == "__main__"'
        ) from None
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        raise UserError(
            f"--program {program} cannot be imported: line {(lines or [0])[-1]}: {type(error).__name__}: {error}: mend "
            "it, and see that python can run it"
        ) from None
    layers: DescribesLayers = getattr(module, "layers", gpt_layers)
    if not callable(layers):
        raise UserError(f"--program {program}: its `layers` is a {type(layers).__name__}: use a function of that name")
    return layers
