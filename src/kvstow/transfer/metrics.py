"""Numbers of one transfer agent, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvstow.observe import DURATIONS


class TransferMetrics:
    """Numbers of one transfer agent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvstow_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"kvstow_{name}", text, registry=registry)

        self.transfers = counter("transfers", "Pulls that ended, by outcome", "outcome")
        self.bytes = counter("transfer_bytes", "Bytes pulled", "direction")
        self.served_bytes = counter(
            "transfer_served_bytes", "Bytes that peers pulled from here", "direction"
        )
        self.descriptors = counter(
            "transfer_descriptors", "Descriptors posted to the transport", "direction"
        )
        self.seconds = Histogram(
            "kvstow_transfer_seconds",
            "Seconds from pull to acceptance",
            registry=registry,
            buckets=DURATIONS,
        )
        self.messages = counter(
            "transfer_messages", "Side channel messages dropped, by reason", "reason"
        )
        self.leases = gauge("transfer_leases", "Active leases")
        self.lease_ends = counter("transfer_lease_ends", "Leases that ended, by reason", "reason")
        self.quarantined = gauge(
            "transfer_quarantined_rows", "Rows that a failed transfer might still write to"
        )
        self.peers = gauge("transfer_peers", "Connected peers")
        self.contacts = counter(
            "transfer_contacts", "Peers met, by outcome: mapped, or the reason why not", "outcome"
        )
        self.errors = counter(
            "transfer_errors", "Errors while serving or pulling; each is logged", "what"
        )
