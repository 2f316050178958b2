"""Small tasks on data that ships with packages, for the demo, the configurations and the notebooks."""
