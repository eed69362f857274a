"""Ways to break a plan document, by what they break; `plan_mutations` has them all."""
