"""Which checkpoint a run continues from: the one that was named, or the last published one that is intact. The pointer
may name an older checkpoint, and a directory may be damaged. All ranks together check every file of a candidate. The
report names each candidate that they refuse, and the reason."""

from __future__ import annotations

from dataclasses import dataclass

from megacore.checkpoint.check import check_settings
from megacore.checkpoint.directory import MANIFEST_NAME, POINTER_NAME, lost
from megacore.checkpoint.files import refuse_unlisted
from megacore.checkpoint.load import first_problem, read_together, verified_together
from megacore.checkpoint.manifest import IN_DOUBT, checkpoints_of, read_manifest, way_to_a_checkpoint
from megacore.config import ResolvedConfig
from megacore.config.checkpoint import AUTO
from megacore.errors import CheckpointError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Group
from megacore.remote import Location, location


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a run continues from."""

    directory: Location | None  # the checkpoint; None for a fresh start
    refused: tuple[str, ...] = ()  # newer ones that were passed over, or are gone, each with the reason


def choose_checkpoint(config: ResolvedConfig, world: Group) -> Choice:
    """Find what `--load` means; all ranks call this together and get the same. Raises CheckpointError where there is
    nothing to continue from, what there is belongs to another model, or the ranks were given different checkpoints."""
    load = config.checkpoint.load
    if load is None:
        return Choice(directory=None)
    run = location(config.checkpoint_dir if load == AUTO else load)
    if load != AUTO and (run / MANIFEST_NAME).is_file():
        # A checkpoint that is named is taken as it is, also one in doubt: nothing else is tried in its place.
        return Choice(directory=read_together(run, world)[0])  # loading checks its files
    refused: list[str] = []
    names, missed = _candidates(run, world)
    for directory in (run / name for name in names):
        if (problem := whole(directory, world)) is None:
            found, manifest = read_together(directory, world)
            if not manifest.is_in_doubt:
                check_settings(config, found, manifest)
                return Choice(directory=directory, refused=(*missed, *refused))
            problem = f"{directory}, {IN_DOUBT} (--load {directory} takes it nevertheless)"
        refused.append(problem)
    if load == AUTO and not names:
        return Choice(directory=None, refused=missed)
    if not refused:
        raise CheckpointError(f"--load {load} holds no checkpoint: {way_to_a_checkpoint(run)}")
    listed = "; ".join(refused)
    raise CheckpointError(
        f"--load {load}: none of the {len(refused)} checkpoints of {run} can be continued: {listed}: "
        "bring one back from a copy, or leave --load out to start afresh"
    )


def _candidates(run: Location, world: Group) -> tuple[list[str], tuple[str, ...]]:
    """The names of the run's checkpoints as the first rank sees them, and what it misses there."""
    names, missed, problem = list[str](), tuple[str, ...](), None
    if world.is_first:
        try:
            names = [directory.name for directory in checkpoints_of(run)]
            if (gone := lost(run)) is not None:
                missed = (f"{run / POINTER_NAME} names {gone.name}, which is not there any more",)
        except CheckpointError as error:
            problem = error
    # Only names are shared: paths may differ between nodes, and `read_together` compares the contents.
    names, missed, problem = all_gather_objects((names, missed, problem), world)[0]
    if problem is not None:
        raise problem
    return names, missed


def whole(directory: Location, world: Group, *, archived: bool = False) -> str | None:
    """What is wrong with a checkpoint, the same on every rank; None where its manifest and all of its files verify.
    `archived`: SHA-256 is taken as well."""
    manifest, problem = None, None
    try:
        manifest = read_manifest(directory)
        refuse_unlisted(directory, manifest.files)
    except CheckpointError as error:
        problem = str(error)
    problem = first_problem(all_gather_objects(problem, world))
    if problem is not None or manifest is None:
        return problem
    return verified_together(directory, manifest, world, archived=archived)
