"""What holds for all tests: no example of a property fails because the machine was busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
