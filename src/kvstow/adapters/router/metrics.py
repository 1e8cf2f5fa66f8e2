"""What the router counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class RouterMetrics:
    """Numbers of the router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvstow_router_requests",
            "Requests by what became of them: tickets, plain (decode computed all), failed",
            ["outcome"],
            registry=registry,
        )
        self.faults = Counter(
            "kvstow_router_faults",
            "Attempts that failed, by kind of instance",
            ["kind"],
            registry=registry,
        )
        self.answers = Counter(
            "kvstow_router_answers",
            "Requests that an instance has answered, by kind of instance and URL",
            ["kind", "url"],
            registry=registry,
        )
        self.left_out = Gauge(
            "kvstow_router_left_out",
            "Instances that failed and get no requests",
            registry=registry,
        )
