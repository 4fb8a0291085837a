"""The parts of a transformer, on one rank or split over a tensor-parallel group."""
