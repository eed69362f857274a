"""lm-eval's own command, with the model `mosaic`."""

from mosaic.evaluation.harness import main

if __name__ == "__main__":
    main()
