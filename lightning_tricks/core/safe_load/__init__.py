"""Files from anywhere, read without running what they hold; files and folders of ours, written atomically."""
