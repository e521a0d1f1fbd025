"""The stop agreement within one process: several coordinators on one store, each with its own thread."""

import math
import os
import signal
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore, Store, TCPStore

from megatron_edit.ranks import signals
from megatron_edit.ranks.signal_pipe import STOP_SIGNALS
from megatron_edit.ranks.signals import StopAgreementError, StopCoordinator, StopReason


def listening() -> StopCoordinator:
    """A lone rank that takes this process's signals."""
    return StopCoordinator(HashStore(), 0, 1, next_boundary=0, timeout_seconds=5, poll_seconds=0.01)


def coordinator(
    store: Store, rank: int, world_size: int, *, timeout_seconds: float = 10, minutes: float | None = None
) -> StopCoordinator:
    return StopCoordinator(
        store, rank, world_size, next_boundary=0, timeout_seconds=timeout_seconds, poll_seconds=0.01,
        exit_duration_minutes=minutes, handle_signals=False,
    )  # fmt: skip


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.002)


def fork(child: Callable[[], None]) -> int:
    """Pid of a child process that runs `child` and exits with 0; 3 when it raises."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_to_stop(stopper: StopCoordinator, iteration: int, last: int = 10_000) -> StopReason | None:
    """Iterations of 1 ms from boundary `iteration`; None: reached boundary `last` without a stop."""
    while iteration < last:
        if (reason := stopper.should_stop(iteration)) is not None:
            return reason
        time.sleep(0.001)
        iteration += 1
    return None


def test_requested_is_seen_on_every_rank_before_any_stops() -> None:
    """A rank that reads it in every step hears of a request between two boundaries; the next one is agreed on."""
    store = HashStore()
    with coordinator(store, 0, 2) as asked, coordinator(store, 1, 2) as other:
        assert not asked.requested and not other.requested
        asked.request_stop("asked")
        wait_until(lambda: asked.requested and other.requested)
        reasons = [run_to_stop(stopper, 0) for stopper in (asked, other)]
        assert reasons[0] == reasons[1] is not None


def test_request_before_the_first_step_costs_no_step() -> None:
    with coordinator(HashStore(), 0, 1) as stopper:
        stopper.request_stop("asked early")
        wait_until(stopper._settled.is_set)
        assert stopper.should_stop(0) == StopReason("asked early", 0, 0)


def test_rank_that_is_ahead_sets_the_target_and_the_one_behind_follows() -> None:
    store = HashStore()
    with coordinator(store, 0, 2) as ahead, coordinator(store, 1, 2) as behind:
        for iteration in range(50):
            assert ahead.should_stop(iteration) is None
        assert behind.should_stop(0) is None
        behind.request_stop("test")
        wait_until(lambda: ahead._settled.is_set() and behind._settled.is_set())
        first, second = run_to_stop(ahead, 50), run_to_stop(behind, 1)
    assert first == second
    assert first is not None and first.iteration >= 50 and first.rank == 1


def test_waiting_at_the_own_proposal_ends_when_a_rank_whose_main_thread_never_comes_has_answered() -> None:
    store = HashStore()
    with coordinator(store, 0, 2) as stopper:
        assert stopper.should_stop(0) is None
        stopper.request_stop("test")
        wait_until(lambda: stopper._proposal is not None)
        started = time.monotonic()
        with coordinator(store, 1, 2):  # its main thread passes no boundary at all
            reason = run_to_stop(stopper, 1)
        assert reason is not None and reason.iteration == stopper._proposal
        assert time.monotonic() - started < 5


def test_first_of_two_requests_wins_on_both_ranks() -> None:
    store = HashStore()
    with coordinator(store, 0, 2) as one, coordinator(store, 1, 2) as two:
        one.request_stop("from one")
        wait_until(one._settled.is_set)
        two.request_stop("from two")
        reasons = {str(run_to_stop(stopper, 0)) for stopper in (one, two)}
    assert reasons == {"from one on rank 0: all ranks stop after iteration 0"}


def test_silent_rank_is_named_after_the_time_out() -> None:
    store = HashStore()
    with coordinator(store, 0, 3, timeout_seconds=0.2) as stopper, coordinator(store, 2, 3):
        stopper.request_stop("SIGTERM")
        with pytest.raises(StopAgreementError, match=r"SIGTERM on rank 0.*no answer from rank 1 within 0\.2 s"):
            run_to_stop(stopper, 0)


def test_request_after_a_rank_has_finished_lets_the_other_finish() -> None:
    store = HashStore()
    done, behind = coordinator(store, 0, 2), coordinator(store, 1, 2)
    assert run_to_stop(done, 0, last=20) is None
    done.close()
    assert run_to_stop(behind, 0, last=5) is None
    behind.request_stop("too late")
    assert run_to_stop(behind, 5, last=20) is None
    behind.close()


def test_exit_duration_is_rank_0s_clock() -> None:
    store = HashStore()
    with coordinator(store, 0, 2, minutes=0.1 / 60) as one, coordinator(store, 1, 2, minutes=1e-9) as two:
        started = time.monotonic()
        reason = run_to_stop(one, 0)
        assert time.monotonic() - started >= 0.09
        assert reason is not None and reason.rank == 0 and "exit duration of 0.00166667 minutes" in str(reason)
        assert run_to_stop(two, 0) == reason


def test_store_that_is_gone_is_a_named_error() -> None:
    port_read, port_write = os.pipe()

    def host() -> None:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(port_write, str(server.port).encode())
        time.sleep(60)

    pid = fork(host)
    store = TCPStore("127.0.0.1", int(os.read(port_read, 16)), is_master=False, wait_for_workers=False)
    with coordinator(store, 3, 4) as stopper:
        assert stopper.should_stop(0) is None
        os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL
        with pytest.raises(StopAgreementError, match=r"rank 3: the store through which stop .* is gone"):
            run_to_stop(stopper, 1)
    os.close(port_read)
    os.close(port_write)


def test_a_boundary_left_out_is_a_programmer_error() -> None:
    with (
        coordinator(HashStore(), 0, 1) as stopper,
        pytest.raises(AssertionError, match="boundary 1, expected 0"),
    ):
        stopper.should_stop(1)


def test_handlers_and_wakeup_pipe_are_given_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    stopper = listening()
    assert all(signal.getsignal(number) not in before for number in STOP_SIGNALS)
    stopper.close()
    stopper.close()
    stopper.request_stop("after the end")  # no effect
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not stopper._thread.is_alive()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_to_this_process(number: signal.Signals) -> None:
    with listening() as stopper:
        os.kill(os.getpid(), number)
        reason = run_to_stop(stopper, 0)
    assert reason is not None and reason.cause == number.name


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 1), (signal.SIGTERM, 0)])
def test_second_interrupt_ends_at_once_second_sigterm_does_not(number: signal.Signals, expected: int) -> None:
    ready_read, ready_write = os.pipe()

    def child() -> None:
        with listening() as stopper:
            os.write(ready_write, b"x")
            time.sleep(2.0)  # stands for a save
            assert stopper.should_stop(0) is not None

    pid = fork(child)
    os.read(ready_read, 1)
    for pause in (0.05, 1.1, 0.0):  # the second comes as a launcher's echo of the first
        os.kill(pid, number)
        time.sleep(pause)
    assert exit_code(pid) == expected
    os.close(ready_read)
    os.close(ready_write)


def test_signals_after_the_stop_do_nothing_until_the_process_has_ended() -> None:
    """Between the save and the end a launcher sends more of them; the exit code stays the rank's own."""
    ready_read, ready_write = os.pipe()

    def child() -> None:
        with StopCoordinator(HashStore(), 0, 1, next_boundary=0, timeout_seconds=5, until_exit=True):
            pass
        os.write(ready_write, b"x")
        time.sleep(0.5)  # stands for the last barrier

    pid = fork(child)
    os.read(ready_read, 1)
    for number in STOP_SIGNALS:
        os.kill(pid, number)
    assert exit_code(pid) == 0
    os.close(ready_read)
    os.close(ready_write)


def test_a_hangup_that_nohup_has_made_ignored_stays_ignored() -> None:
    def child() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with listening() as stopper:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert stopper.should_stop(0) is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    assert exit_code(fork(child)) == 0


def test_a_stop_is_announced_when_it_is_agreed_on_and_silence_before(capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    signals.SILENCE_SECONDS, before = 0.1, signals.SILENCE_SECONDS
    try:
        with coordinator(store, 0, 2) as asked:
            asked.request_stop("SIGTERM")
            wait_until(lambda: asked._proposed_at == math.inf and asked._proposal is not None)
            time.sleep(0.05)
            said = capfd.readouterr().err
            assert said.startswith("rank 0: SIGTERM: no answer yet from rank 1;") and "will save" not in said
            with coordinator(store, 1, 2):
                wait_until(asked._settled.is_set)
            assert capfd.readouterr().err == "rank 0: SIGTERM: all ranks will save and stop after the same iteration\n"
    finally:
        signals.SILENCE_SECONDS = before


def test_ending_a_forked_child_is_no_request_to_its_parent() -> None:
    with listening() as stopper:
        started_read, started_write = os.pipe()

        def child() -> None:
            os.write(started_write, b"1")
            time.sleep(30)

        pid = fork(child)
        assert os.read(started_read, 1) == b"1"  # its handlers are its own from here on, however busy the machine is
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches the child of a process on a terminal, too
        time.sleep(0.05)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "SIGINT must not cut a child's work short"
        os.kill(pid, signal.SIGTERM)
        assert exit_code(pid) == -signal.SIGTERM
        time.sleep(0.1)
        assert stopper.should_stop(0) is None
        os.close(started_read)
        os.close(started_write)
