pytest_plugins = ["ranks"]
