"""The analysis of departures finds the violations that are put in."""

import numpy as np
import pytest
from fbtest import analysis as an
from hypothesis import given, settings
from hypothesis import strategies as st

MBIT = 1_000_000
SIZE = 1250  # 10,000 bits: 10 us at 1 Gbit/s


def paced(n, rate=1000 * MBIT, size=SIZE, start=10**18):
    """Departures of n packets, perfectly paced."""
    gap = size * 8 * an.NS // rate
    return start + gap * np.arange(n, dtype=np.int64), np.full(n, size)


class TestMaxExcess:
    def test_paced_needs_one_packet(self):
        t, size = paced(10_000)
        assert an.max_excess(t, size, 1000 * MBIT).bytes == pytest.approx(SIZE)
        assert an.conforms(t, size, 1000 * MBIT, SIZE)
        assert not an.conforms(t, size, 1000 * MBIT, SIZE - 1)

    def test_a_burst_is_found_where_it_is(self):
        t, size = paced(10_000)
        t[5000:5010] = t[5000]
        worst = an.max_excess(t, size, 1000 * MBIT)
        assert (worst.first, worst.last) == (5000, 5009)
        assert worst.bytes == pytest.approx(10 * SIZE)
        assert worst.window_s == 0

    def test_a_slightly_fast_stretch_adds_up(self):
        # 1 % too fast over 1000 packets: no two packets show it.
        t, size = paced(10_000)
        gaps = np.diff(t)
        gaps[4000:5000] = gaps[4000:5000] * 99 // 100
        t = np.r_[t[0], t[0] + np.cumsum(gaps)]
        worst = an.max_excess(t, size, 1000 * MBIT)
        assert worst.bytes == pytest.approx(SIZE + 10 * SIZE)
        assert (worst.first, worst.last) == (4000, 5000)

    def test_catching_up_after_a_stall_is_a_violation(self):
        t, size = paced(1000)
        t[500:600] = t[600]  # held back, then released at once
        assert not an.conforms(t, size, 1000 * MBIT, 2 * SIZE)
        # ... which the gap in which nothing could leave explains.
        assert an.conforms(t, size, 1000 * MBIT, 2 * SIZE, gap_s=1e-3)

    def test_idle_time_gives_no_credit(self):
        t, size = paced(1000)
        t[500:] += an.NS
        t[500:504] = t[500]
        assert an.max_excess(t, size, 1000 * MBIT).bytes == pytest.approx(4 * SIZE)

    def test_mixed_sizes(self):
        size = np.array([60, 1514, 60, 9000])
        t = np.array([0, 480, 480 + 12112, 480 + 12112 + 480])
        worst = an.max_excess(t, size, 1000 * MBIT)
        assert worst.bytes == pytest.approx(9000)
        assert (worst.first, worst.last) == (3, 3)

    def test_refuses_nonsense(self):
        with pytest.raises(ValueError, match="go back"):
            an.max_excess([2, 1], [1, 1], 1)
        with pytest.raises(ValueError, match="as many"):
            an.max_excess([1], [1, 1], 1)
        with pytest.raises(ValueError, match="rate"):
            an.max_excess([1], [1], 0)
        assert an.max_excess([], [], 1).bytes == 0

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 50_000), st.integers(60, 9000)),
                    min_size=1, max_size=40),
           st.integers(10**6, 10**10))
    def test_as_by_all_pairs(self, packets, rate):
        t = np.cumsum([gap for gap, _ in packets])
        size = np.array([length for _, length in packets])
        every = max(
            size[i:j + 1].sum() - (t[j] - t[i]) * rate / 8 / an.NS
            for j in range(len(t)) for i in range(j + 1))
        worst = an.max_excess(t, size, rate)
        assert worst.bytes == pytest.approx(every, abs=1e-3)
        window = slice(worst.first, worst.last + 1)
        assert worst.bytes == pytest.approx(
            size[window].sum() - (t[worst.last] - t[worst.first]) * rate / 8 / an.NS,
            abs=1e-3)


class TestMaxDeficit:
    def test_paced_never_lags(self):
        t, size = paced(1000)
        assert an.max_deficit(t, size, 1000 * MBIT).bytes == pytest.approx(0)

    def test_a_pause_is_found(self):
        t, size = paced(1000)
        t[300:] += 1_000_000
        short = an.max_deficit(t, size, 1000 * MBIT)
        assert short.bytes == pytest.approx(125_000)
        assert (short.first, short.last) == (299, 300)


class TestRates:
    def test_rate_of_a_window(self):
        t, size = paced(100_000)
        assert an.packet_rate(t, size, t[0], t[0] + 500_000_000) == pytest.approx(1000 * MBIT)
        assert an.paced_rate(t, size) == pytest.approx(1000 * MBIT)
        with pytest.raises(ValueError, match="empty"):
            an.packet_rate(t, size, 5, 5)

    def test_a_rate_half_a_percent_off_shows(self):
        t, size = paced(100_000)
        t = t[0] + (t - t[0]) * 1000 // 1005
        assert an.paced_rate(t, size) / (1000 * MBIT) == pytest.approx(1.005, abs=1e-4)

    def test_bins(self):
        t, size = paced(30_000)
        t = np.r_[t, t[-1] + 20_000 * np.arange(1, 10_001)]
        size = np.full(len(t), SIZE)
        when, rate = an.binned_rate(t, size, 100_000_000)
        assert len(when) == 4 and when[0] == pytest.approx(0.05)
        assert rate[:3] == pytest.approx(1000 * MBIT, rel=1e-3)
        assert rate[3] == pytest.approx(500 * MBIT, rel=1e-3)


class TestOrder:
    def flows(self):
        flow = np.tile([1, 2, 3], 1000)
        seq = np.repeat(np.arange(1000), 3)
        return flow, seq

    def test_in_order(self):
        report = an.check_order(*self.flows())
        assert report.in_order and report.missing == 0
        assert (report.packets, report.flows) == (3000, 3)

    def test_two_swapped(self):
        flow, seq = self.flows()
        seq[[300, 303]] = seq[[303, 300]]
        report = an.check_order(flow, seq)
        assert not report.in_order
        assert (report.reordered, report.missing) == (1, 0)
        assert report.worst == {1: 1}

    def test_flows_may_overtake_each_other(self):
        flow, seq = self.flows()
        order = np.r_[np.flatnonzero(flow == 3), np.flatnonzero(flow != 3)]
        assert an.check_order(flow[order], seq[order]).in_order

    def test_one_late_by_ten_counts_once(self):
        seq = [0, 1, *range(3, 13), 2, 13]
        report = an.check_order([7] * len(seq), seq)
        assert (report.reordered, report.missing) == (1, 0)

    def test_repeated_and_lost(self):
        report = an.check_order([7] * 5, [0, 1, 1, 4, 5])
        assert (report.reordered, report.repeated, report.missing) == (0, 1, 2)

    def test_untagged_are_ignored(self):
        report = an.check_order([-1, 1, -1, 1], [-1, 0, -1, 1])
        assert (report.packets, report.in_order) == (2, True)
        assert an.check_order([], []).packets == 0

    @pytest.mark.parametrize("modulus", [4, 64, 1000])
    def test_repeating_source(self, modulus):
        seq = np.arange(5000) % modulus
        assert an.check_order(np.zeros(5000), seq, modulus).in_order
        swapped = seq.copy()
        swapped[[2000, 2001]] = swapped[[2001, 2000]]
        report = an.check_order(np.zeros(5000), swapped, modulus)
        assert not report.in_order

    def test_repeating_source_with_loss(self):
        seq = np.delete(np.arange(5000) % 64, slice(100, 120))
        report = an.check_order(np.zeros(len(seq)), seq, 64)
        assert report.in_order and report.missing == 20


def test_gaps():
    gaps = an.gap_statistics([0, 100, 200, 50_000, 100_000], near_ns=1000)
    assert gaps.back_to_back == 3
    assert gaps.count == 4
    assert gaps.max_us == pytest.approx(50)
    assert an.gap_statistics([5]).count == 0


class TestCounterSeries:
    def series(self, rates, step=0.05):
        """A counter that grows at `rates`, one after the other, for 1 s each."""
        time, total = [100.0], [0.0]
        for rate in rates:
            for _ in range(round(1 / step)):
                time.append(time[-1] + step)
                total.append(total[-1] + rate * step / 8)
        return an.CounterSeries(time, total)

    def test_rate(self):
        s = self.series([100 * MBIT, 200 * MBIT])
        assert s.rate(100, 101) == pytest.approx(100 * MBIT)
        assert s.rate(101, 102) == pytest.approx(200 * MBIT)
        assert s.rate(100, 102) == pytest.approx(150 * MBIT)
        with pytest.raises(ValueError, match="fewer than two"):
            s.rate(100.01, 100.02)

    def test_rates_of_windows(self):
        middle, rate = self.series([100 * MBIT, 200 * MBIT]).rates(0.25)
        assert rate[:4] == pytest.approx(100 * MBIT)
        assert rate[-4:] == pytest.approx(200 * MBIT)
        assert middle[0] == pytest.approx(100.125, abs=0.03)

    def test_excess(self):
        s = self.series([100 * MBIT, 300 * MBIT, 100 * MBIT])
        worst = s.max_excess(100 * MBIT)
        assert worst.bytes == pytest.approx(200 * MBIT / 8)
        assert worst.window_s == pytest.approx(1)
        assert s.max_excess(301 * MBIT).bytes == 0

    def test_counters_do_not_fall(self):
        with pytest.raises(ValueError, match="go back"):
            an.CounterSeries([0, 1], [5, 4])

    def test_settles_at_once(self):
        s = self.series([100 * MBIT, 200 * MBIT], step=0.005)
        settled = an.settle_time(s, 101, 200 * MBIT, 0.02, 0.025, 102)
        assert settled.delay_s < 0.01
        assert settled.resolution_s == pytest.approx(0.025, abs=0.006)

    def test_settles_late(self):
        s = self.series([100 * MBIT, 100 * MBIT, 200 * MBIT], step=0.005)
        settled = an.settle_time(s, 101.5, 200 * MBIT, 0.02, 0.025, 103)
        assert settled.delay_s == pytest.approx(0.5, abs=0.01)

    def test_a_late_dip_counts(self):
        s = self.series([200 * MBIT] * 3, step=0.005)
        s.total[500:] -= 50_000  # 0.4 Mbit short, 2.5 s on
        s.total = np.maximum.accumulate(s.total)
        settled = an.settle_time(s, 100, 200 * MBIT, 0.02, 0.025, 103)
        assert settled.delay_s == pytest.approx(2.5, abs=0.02)

    def test_never_settles(self):
        s = self.series([100 * MBIT] * 2, step=0.005)
        with pytest.raises(ValueError, match="not settled"):
            an.settle_time(s, 101, 200 * MBIT, 0.02, 0.025, 102)
        with pytest.raises(ValueError, match="no whole window"):
            an.settle_time(s, 101.99, 200 * MBIT, 0.02, 0.025, 102)
