from pathlib import Path

from setuptools import find_packages, setup

TEST = ["pytest>=8", "pytest-xdist>=3.6", "ruff>=0.15", "mypy>=1.18", "tqdm>=4.66"]
LIBRARIES = [
    "peft>=0.19",
    "accelerate>=1.10",
    "trl==1.16.*",
    "deepspeed==0.19.*",
    "triton>=3.4; platform_system == 'Linux'",
]

setup(
    name="streambp",
    version="0.1.0",
    description="Exact chunked backpropagation for training HuggingFace models on very long sequences",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["streambp", "streambp.*"]),
    package_data={"streambp": ["py.typed"], "streambp.planner": ["web/*"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11,<2.14", "transformers>=5.17,<5.24"],
    extras_require={
        "trl": ["trl==1.16.*"],
        "deepspeed": ["deepspeed==0.19.*"],
        "peft": ["peft>=0.19"],
        "examples": ["tqdm>=4.66", "tokenizers", "peft>=0.19", "trl==1.16.*", "matplotlib>=3.9"],
        "test": [
            *TEST,
            "peft>=0.19",
            "accelerate>=1.10",
            "trl==1.16.*",
            "deepspeed==0.19.*",
            "triton>=3.4; platform_system == 'Linux'",
        ],
    },
    entry_points={"console_scripts": ["streambp = streambp.cli:main"]},
)
