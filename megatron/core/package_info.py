"""The release of Megatron Core that this package stands in for, and the package's own metadata.

Plug-ins for Megatron Core compare `megatron.core.__version__` with a release in order to choose between old and new
names, for example `Version(megatron.core.__version__) >= Version("0.12")`. The version here is therefore not this
project's own, which is `megatron.__version__`, but that of Megatron Core whose interface applies: the last release
before the main branch with which docs/python_names.md compares, and the one that exchanged checkpoints with this
package (tests/megatron_core). It changes when these change. All other values describe this project.
"""

MAJOR = 0
MINOR = 16
PATCH = 1
PRE_RELEASE = ""

# Megatron Core's form: (major, minor, patch, suffix).
VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)

__shortversion__ = f"{MAJOR}.{MINOR}.{PATCH}"
__version__ = __shortversion__ + PRE_RELEASE

__package_name__ = "megatron-stash"
__contact_names__ = "The megatron-stash developers"
__contact_emails__ = ""  # the project has no public address yet
__homepage__ = "https://megatron-stash.example/docs"
__repository_url__ = "https://megatron-stash.example/source"
__download_url__ = "https://megatron-stash.example/source"
__description__ = (
    "Pretrains dense and mixture-of-experts GPT models under Megatron-LM's flags and names, with paged stashing"
)
__license__ = "Apache-2.0"
__keywords__ = "Megatron-LM, mixture of experts, PyTorch, pretraining, distributed training"
