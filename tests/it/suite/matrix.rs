//! The list of behaviours, and the macros that make a test of each in each cell.

/// Behaviours of every lock. The first attributes are for the core, the others for the rest.
macro_rules! all {
    ($core:tt $rest:tt) => {
        crate::suite::matrix::tests! { $core exclusion:
            try_lock_returns_none_while_held renewal_holds_lock_beyond_its_ttl
            calls_return_wrong_type_for_foreign_value
        }
        crate::suite::matrix::tests! { $rest exclusion:
            inspect_reports_holder_and_token lease_ends_with_its_ttl_if_never_renewed
            lease_ends_after_max_hold
        }
        crate::suite::matrix::tests! { $core minimum_hold: release_leaves_the_lock_held_for_its_minimum }
        crate::suite::matrix::tests! { $rest minimum_hold:
            close_leaves_the_lock_held_for_its_minimum minimum_counts_once_if_the_reply_is_lost
            lock_is_free_after_its_minimum waiter_acquires_once_the_minimum_ends
        }
        crate::suite::matrix::tests! { $core renewing: renew_extends_a_lease_that_is_never_renewed }
        crate::suite::matrix::tests! { $rest renewing:
            automatic_renewals_continue_after_one_by_hand renew_never_exceeds_max_hold
            renew_of_a_revoked_lease_returns_lost renew_never_revives_a_lease
            renew_fails_while_servers_are_stopped renew_returns_how_the_lease_has_ended
        }
        crate::suite::matrix::tests! { $core tickets:
            a_hold_is_adopted_from_its_ticket one_of_several_adopts_a_ticket
        }
        crate::suite::matrix::tests! { $rest tickets:
            an_adopted_hold_is_renewed_and_handed_on a_ticket_ends_with_its_ttl
            a_ticket_of_a_revoked_hold_is_lost a_ticket_for_another_lock_is_refused
            adopt_counts_once_if_its_reply_is_lost a_close_leaves_the_hold_of_a_ticket
        }
        crate::suite::matrix::tests! { $core waiting:
            release_grants_at_once_to_waiter waiter_rejects_grant_received_after_its_claim
        }
        crate::suite::matrix::tests! { $rest waiting:
            lock_times_out_and_leaves_queue waiter_acquires_after_holder_expires
            waiter_finds_release_before_its_subscription
            granted_lease_is_renewed_before_its_claim_ends grant_lasts_whole_ttl_if_never_renewed
        }
        crate::suite::matrix::tests! { $core release:
            guard_drop_releases force_release_revokes_and_grants_to_waiter
            holder_is_notified_of_deleted_key
        }
        crate::suite::matrix::tests! { $rest release:
            dropped_lock_futures_leave_nothing_behind settled_waits_for_releases_of_dropped_guards
            dropped_release_future_still_releases force_release_grants_at_once_to_waiter
            losses_are_known_once_the_client_is_connected_again
        }
        crate::suite::matrix::tests! { $core run: work_runs_while_the_lock_is_held }
        crate::suite::matrix::tests! { $rest run:
            failed_work_releases_the_lock work_ends_with_the_lease work_does_not_begin_without_the_lock
            dropped_work_releases_the_lock
        }
        crate::suite::matrix::tests! { $core unknown_outcomes: retried_release_of_lost_lock_returns_error }
        crate::suite::matrix::tests! { $rest unknown_outcomes:
            leak_during_renewal_keeps_lock_until_its_ttl
            waiting_tasks_fail_together_while_server_is_paused
            waiter_is_notified_after_first_waiters_runtime_ended
            renewal_succeeds_despite_silent_connection lost_lease_is_released_once_replies_arrive
            guard_dropped_during_outage_is_released_after_it
            waiter_is_notified_after_its_subscription_broke
            grant_with_lost_reply_is_released_after_reconnect
        }
        crate::suite::matrix::tests! { $core faults:
            acquire_counts_once_if_its_reply_is_lost waiter_acquires_after_server_restarted_empty
            acquire_is_refused_after_its_attempt_ended
        }
        crate::suite::matrix::tests! { $rest faults:
            calls_fail_in_time_while_server_is_stopped
            requests_succeed_after_connection_is_cut lock_succeeds_during_script_flush
            waiters_acquire_while_subscribers_are_killed calls_fail_in_time_while_server_is_down
            try_lock_returns_lost_if_reply_arrives_after_ttl
            held_lock_is_renewed_and_released_on_full_server
        }
    };
}

/// Behaviours of exclusive locks: all but readers.
macro_rules! alone {
    ($core:tt $rest:tt Read) => {};
    ($core:tt $rest:tt $kind:ident) => {
        crate::suite::matrix::tests! { $core exclusion: holders_exclude_each_other_and_tokens_grow }
        crate::suite::matrix::tests! { $rest exclusion:
            tokens_grow_after_data_loss lease_has_no_token_if_fencing_is_off
        }
        crate::suite::matrix::tests! { $rest waiting:
            release_grants_in_queue_order tasks_of_one_client_acquire_in_order
            polling_and_notified_clients_take_turns
        }
        crate::suite::matrix::tests! { $rest unknown_outcomes: tokens_grow_after_restart_from_old_snapshot }
        crate::suite::matrix::tests! { $rest faults: clients_take_turns_while_connections_are_cut }
    };
}

/// Behaviours of locks that the tasks of one client pass on to each other. Elections, and several
/// locks together, are tested with mutexes.
macro_rules! passed_on {
    ($core:tt $rest:tt Mutex) => {
        crate::suite::matrix::passed_on! { $core $rest }
        crate::suite::matrix::tests! { $core several:
            several_locks_are_held_and_released_together one_busy_lock_keeps_all_from_being_tried
        }
        crate::suite::matrix::tests! { $rest several:
            locks_of_one_slot_are_one_request a_name_twice_is_an_error_before_any_request
            work_under_several_locks_ends_with_the_first_loss a_task_that_waits_holds_no_later_lock
            a_lease_that_ends_while_another_lock_is_waited_for_is_an_error
            one_limit_covers_a_silent_server
            random_sets_of_names_do_not_deadlock
        }
        crate::suite::matrix::tests! { $core election: one_candidate_leads_at_a_time }
        crate::suite::matrix::tests! { $rest election:
            a_leader_that_lost_its_lease_competes_again an_election_outlasts_an_outage
            an_election_ends_with_its_work a_dropped_election_leaves_nothing
            an_election_ends_with_a_lasting_error leaders_take_turns_with_a_longest_hold
        }
    };
    ($core:tt $rest:tt Write) => {
        crate::suite::matrix::passed_on! { $core $rest }
    };
    ($core:tt $rest:tt) => {
        crate::suite::matrix::tests! { $rest minimum_hold: no_hold_with_a_minimum_is_passed_on }
        crate::suite::matrix::tests! { $core local_turns: tasks_pass_a_hold_on_without_a_request }
        crate::suite::matrix::tests! { $rest local_turns:
            no_hold_is_passed_on_if_the_turn_is_zero holds_without_tokens_are_passed_on
            a_lease_that_was_passed_on_is_not_held
            a_passed_hold_goes_on_if_its_receiver_is_dropped
            a_passed_hold_without_a_receiver_is_released
            tasks_that_come_while_one_waits_have_its_turn
            a_hold_is_not_passed_to_a_call_with_other_options other_clients_have_their_turn
            tokens_grow_after_the_counter_is_lost_between_turns
            tokens_of_a_revoked_turn_are_smaller_than_the_next a_close_releases_a_passed_hold
            a_close_releases_a_hold_that_no_task_receives
            a_forced_release_ends_the_turn_of_its_client a_lost_hold_is_not_passed_on
            a_passed_hold_is_released_before_all_is_settled each_hold_reports_its_release_once
        }
    };
    ($core:tt $rest:tt $kind:ident) => {};
}

/// Behaviours of locks that the tasks of one client hold together.
macro_rules! shared {
    ($core:tt $rest:tt Read) => {
        crate::suite::matrix::tests! { $core shared_reads: tasks_read_under_one_hold_without_a_request }
        crate::suite::matrix::tests! { $rest shared_reads:
            one_task_asks_for_all_that_wait
            dropped_readers_leave_nothing a_task_that_is_not_polled_keeps_no_hold
            a_task_with_other_options_keeps_no_hold
            a_revoked_hold_is_lost_for_all_its_readers readers_share_only_what_they_may
            a_downgraded_hold_may_be_joined a_renewal_extends_a_shared_hold a_sole_reader_becomes_a_ticket a_leaked_read_stays_until_its_ttl
            a_close_ends_all_shared_reads a_task_that_reads_learns_that_it_waits_for_itself
            writers_have_their_turn_beside_shared_reads each_shared_read_reports_its_release_once
        }
        crate::suite::matrix::tests! { $rest late_readers:
            a_reader_that_comes_late_has_a_hold_of_its_own a_reader_that_is_late_twice_asks_for_itself
            a_turn_of_readers_ends_when_another_begins nothing_is_left_after_the_last_release
            a_hold_that_is_kept_for_a_task_ends_once_that_leaves
        }
    };
    ($core:tt $rest:tt $kind:ident) => {};
}

/// Behaviours of locks that an owner may hold several times, or on both sides.
macro_rules! owners {
    ($core:tt $rest:tt Reentrant) => {
        crate::suite::matrix::tests! { $core nesting:
            nested_holds_are_counted_up_and_down owner_reenters_past_waiters
        }
        crate::suite::matrix::tests! { $rest nesting:
            queued_owner_reenters_after_acquiring_elsewhere ttl_is_largest_of_nested_holds
            stale_release_leaves_new_hold_alone loss_ends_leases_at_every_depth
            lock_returns_too_deep_beyond_max_depth local_nesting_makes_no_round_trip
            only_the_last_release_leaves_a_lock_held one_of_several_holds_is_adopted
            guards_of_one_local_hold_become_no_ticket nested_grant_shows_the_loss_of_the_outer_hold
        }
    };
    ($core:tt $rest:tt Write) => {
        crate::suite::matrix::tests! { $core rw_modes:
            owner_and_stranger_acquire_as_the_table_lists tokens_grow_with_each_write
        }
        crate::suite::matrix::tests! { $rest rw_modes:
            write_is_refused_beside_another_reader
            reads_and_writes_of_an_owner_are_counted_separately
            read_stays_held_after_write_is_released each_side_returns_too_deep_beyond_max_depth
            rwlock_returns_wrong_type_for_other_kind inner_write_keeps_larger_ttl
        }
        crate::suite::matrix::tests! { $core upgrades: upgrade_succeeds_once_owner_is_sole_reader }
        crate::suite::matrix::tests! { $rest upgrades:
            second_upgrade_returns_would_deadlock cancelled_upgrade_admits_waiting_readers
            cancelled_upgrade_leaves_that_of_another_task
            upgrade_overtakes_waiting_writers_of_same_client
        }
        crate::suite::matrix::tests! { $core downgrades: downgrade_admits_readers_before_any_writer }
        crate::suite::matrix::tests! { $rest downgrades:
            downgraded_lease_is_renewed counter_stays_behind_the_clock_with_downgrades_in_turns
            downgrade_converts_one_of_several_holds
            downgrade_counts_once_if_its_reply_is_lost downgrade_keeps_ttl_of_other_holds
            late_downgrade_reply_yields_no_longer_lease
        }
        crate::suite::matrix::tests! { $rest readers:
            dead_reader_blocks_writer_until_its_ttl owners_expire_independently
            readers_enter_after_waiting_writer_gave_up force_release_revokes_one_side_only
            inspect_reports_both_sides read_beyond_max_readers_is_refused
        }
        crate::suite::matrix::tests! { $rest fairness:
            writer_enters_among_eight_readers reader_enters_among_eight_writers
            readers_and_writers_get_fair_shares all_tasks_of_one_client_enter
        }
    };
    ($core:tt $rest:tt $kind:ident) => {};
}

macro_rules! tests {
    ($attributes:tt $module:ident: $($behaviour:ident)+) => {
        $(crate::suite::matrix::test! { $attributes $module $behaviour })+
    };
}

macro_rules! test {
    ([$($attribute:tt)*] $module:ident $behaviour:ident) => {
        #[test]
        $($attribute)*
        fn $behaviour() {
            crate::suite::run(CELL, |setup| Box::pin(crate::suite::$module::$behaviour(setup)));
        }
    };
}

/// How much of a cell runs without `--full`:
/// - `all`: every behaviour.
/// - `wide`: the behaviours of all kinds, and the core of those with owners.
/// - `core`: the core of all.
/// - `full`: nothing.
macro_rules! matrix {
    (all; $($cells:tt)+) => { crate::suite::matrix::matrix! { [] [] [] $($cells)+ } };
    (wide; $($cells:tt)+) => {
        crate::suite::matrix::matrix! { [] [] [#[ignore = "takes long: scripts/test --full"]] $($cells)+ }
    };
    (core; $($cells:tt)+) => {
        crate::suite::matrix::matrix! {
            [] [#[ignore = "takes long: scripts/test --full"]] [#[ignore = "takes long: scripts/test --full"]]
            $($cells)+
        }
    };
    (full; $($cells:tt)+) => {
        crate::suite::matrix::matrix! {
            [#[ignore = "takes long: scripts/test --full"]] [#[ignore = "takes long: scripts/test --full"]]
            [#[ignore = "takes long: scripts/test --full"]] $($cells)+
        }
    };
    ($core:tt $rest:tt $owners:tt $($cell:ident = $topology:ident($kind:ident, $wake:ident, $protocol:ident);)+) => {
        $(mod $cell {
            use crate::support::{Cell, Kind, Protocol, Topology, Wake};

            const CELL: Cell = Cell {
                topology: Topology::$topology,
                kind: Kind::$kind,
                wake: Wake::$wake,
                protocol: Protocol::$protocol,
            };

            crate::suite::matrix::all! { $core $rest }
            crate::suite::matrix::alone! { $core $rest $kind }
            crate::suite::matrix::passed_on! { $core $rest $kind }
            crate::suite::matrix::shared! { $core $rest $kind }
            crate::suite::matrix::owners! { $core $owners $kind }
        })+
    };
}

pub(crate) use {all, alone, matrix, owners, passed_on, shared, test, tests};
