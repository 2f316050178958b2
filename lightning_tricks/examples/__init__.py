"""Small tasks on data that ships with packages: what the demo, the configurations and the notebooks train."""
