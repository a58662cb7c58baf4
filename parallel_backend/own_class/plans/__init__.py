"""Results of trials (`Proof`), and the results for published models, which ship with the pack (`Plan`)."""
