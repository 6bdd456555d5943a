"""Looks with numbers that tell which is which."""

from trivium.train.probe import GradNorms, Layers


def look_of(step, num_layers=4, num_heads=3, block_size=2):
    """Every fourth layer is MLA. Read r gives its last source all but 0.01·r, the others the same share of that."""

    def read(num_sources, read_idx):
        rest = 0.01 * read_idx if num_sources > 1 else 0.0
        return (*[rest / max(1, num_sources - 1)] * (num_sources - 1), 1 - rest)

    def num_sources(layer_idx, *, behind_mixer):
        return 1 + layer_idx // block_size + (behind_mixer or layer_idx % block_size > 0)

    layers = range(num_layers)
    return Layers(
        step=step,
        tokens=10 * step,
        grad_norm=GradNorms(
            layers=tuple(step + 0.1 * idx for idx in layers), embedding=0.5 * step, head=2.0 * step, rest=0.0
        ),
        mixer_read=tuple(read(num_sources(idx, behind_mixer=False), 2 * idx) for idx in layers),
        ffn_read=tuple(read(num_sources(idx, behind_mixer=True), 2 * idx + 1) for idx in layers),
        output_read=read(num_sources(num_layers - 1, behind_mixer=True), 2 * num_layers),
        half_life_tokens=tuple(
            None if idx % 4 == 3 else tuple(10.0 * step + idx - 0.1 * head for head in range(num_heads))
            for idx in layers
        ),
        stream_rms=tuple(100.0 * step + idx for idx in layers),
        mixer_rms=tuple(200.0 * step + idx for idx in layers),
        ffn_rms=tuple(300.0 * step + idx for idx in layers),
    )
