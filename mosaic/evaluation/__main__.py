"""lm-eval's own command, with the model `mosaic`."""

import sys

from mosaic.errors import MissingExtra

if __name__ == "__main__":
    try:
        from mosaic.evaluation.harness import main
    except MissingExtra as error:
        sys.exit(f"mosaic: {error}")
    main()
