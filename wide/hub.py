"""Names on the Hugging Face hub."""

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form OWNER/NAME that the hub gives its repositories."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1
