"""What published recipes did about positions, for comparison with what is suggested here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Published:
    model: str
    lengths: str
    positions: str
    source: str


PUBLISHED = (
    Published(
        model="Llama 3.1 405B",
        lengths="8K → 128K in six steps",
        positions="base 5e5 from the start; released with llama3 scaling",
        source="arXiv 2407.21783",
    ),
    Published(
        model="Qwen2.5-1M",
        lengths="64K → 128K → 256K",
        positions="base 1e6, 5e6, 1e7",
        source="arXiv 2501.15383",
    ),
    Published(
        model="Qwen3",
        lengths="32K",
        positions="base 1e4 → 1e6; YaRN ×4 without training",
        source="arXiv 2505.09388",
    ),
    Published(
        model="ProLong (Llama-3-8B)",
        lengths="64K, then 512K",
        positions="base 8e6, 1.28e8",
        source="arXiv 2410.02660",
    ),
    Published(
        model="Untie the Knots (Qwen2-7B)",
        lengths="32K → 128K",
        positions="base 1e6 → 5e6",
        source="arXiv 2409.04774",
    ),
    Published(
        model="HARPE (Llama-2-7B)",
        lengths="4K → 128K",
        positions="a base per head, 1e6 to 5e6",
        source="arXiv 2412.07171",
    ),
    Published(
        model="Olmo 3",
        lengths="8K → 64K",
        positions="base 5e5, YaRN ×8 on layers with full attention",
        source="Olmo 3 report",
    ),
    Published(
        model="SmolLM3 3B",
        lengths="32K, 64K",
        positions="base 1.5e6, 5e6; YaRN to 128K without training",
        source="SmolLM3 blog",
    ),
    Published(
        model="DeepSeek-V3",
        lengths="32K, 128K",
        positions="YaRN, factor 40",
        source="arXiv 2412.19437",
    ),
    Published(
        model="Gemma 3",
        lengths="32K → 128K",
        positions="global layers base 1e6, then PI ×8; local layers 1e4",
        source="arXiv 2503.19786",
    ),
    Published(
        model="Gradient Llama-3-8B",
        lengths="64K, 256K, 512K, 1M",
        positions="base 1.53e7, 2.07e8, 1.06e9, 2.8e9",
        source="model cards on the Hub",
    ),
)
