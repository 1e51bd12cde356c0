"""Floor 3: many ranks, dense (paper, Section IV). Mesh, collectives, tensor slicing."""
