//! Which behaviours there are, and how a test is made of each.

/// What holds for every lock. The first attributes are for the core, the others for the rest.
macro_rules! all {
    ($core:tt $rest:tt) => {
        crate::suite::cells::tests! { $core holds:
            says_busy_at_once renews_for_ten_ttls refuses_what_it_does_not_own
        }
        crate::suite::cells::tests! { $rest holds:
            inspects leaks_on_request ends_with_its_ttl_if_never_renewed ends_after_its_longest_hold
        }
        crate::suite::cells::tests! { $core waits:
            hands_over_at_once trusts_no_grant_that_was_long_under_way
        }
        crate::suite::cells::tests! { $rest waits:
            gives_up_in_time takes_over_after_expiry misses_no_release_between_try_and_wait
            renews_what_was_handed_over_before_its_claim_ends hands_over_for_the_whole_ttl_if_never_renewed
        }
        crate::suite::cells::tests! { $core ends:
            releases_on_drop is_taken_away_by_force tells_of_a_loss
        }
        crate::suite::cells::tests! { $rest ends:
            forgets_a_thousand_dropped_futures settles survives_its_release_being_dropped hands_over_by_force
        }
        crate::suite::cells::tests! { $core doubts: takes_no_doubtful_release_for_a_success }
        crate::suite::cells::tests! { $rest doubts:
            leaks_although_a_renewal_is_under_way loses_patience_together
            hears_after_the_runtime_of_the_first_waiter_is_gone renews_past_a_silent_connection
            gives_back_what_it_lost_late releases_what_was_dropped_during_an_outage
            hears_again_after_its_subscription_broke gives_back_what_was_granted_as_the_line_went_dead
        }
        crate::suite::cells::tests! { $core faults:
            counts_once_when_a_reply_is_lost survives_a_restart refuses_what_arrives_after_its_client_gave_up
        }
        crate::suite::cells::tests! { $rest faults:
            survives_a_stopped_server learns_the_first_answer_of_a_release
            survives_a_cut_connection survives_script_flush
            survives_killed_subscribers reports_a_dead_server_in_time takes_no_late_answer_for_a_success
            renews_and_releases_without_memory
        }
    };
}

/// What holds for those of whom there is one at a time.
macro_rules! alone {
    ($core:tt $rest:tt Read) => {};
    ($core:tt $rest:tt $kind:ident) => {
        crate::suite::cells::tests! { $core holds: excludes_and_fences }
        crate::suite::cells::tests! { $rest holds: keeps_tokens_growing_over_a_loss fences_or_not }
        crate::suite::cells::tests! { $rest waits:
            hands_over_in_order wakes_tasks_of_one_client_in_order takes_turns_with_those_who_look
        }
        crate::suite::cells::tests! { $rest doubts: tokens_grow_over_an_old_snapshot }
        crate::suite::cells::tests! { $rest faults: survives_reset_connections }
    };
}

/// What holds where an owner may hold it several times, or on both sides.
macro_rules! owners {
    ($core:tt $rest:tt Reentrant) => {
        crate::suite::cells::tests! { $core nesting: counts_up_and_down enters_past_those_who_wait }
        crate::suite::cells::tests! { $rest nesting:
            enters_what_it_got_elsewhere_meanwhile an_inner_hold_neither_shortens_nor_adds
            a_foreign_release_changes_nothing a_loss_is_a_loss_at_every_depth has_a_deepest_level
            nests_locally_without_a_round_trip
        }
    };
    ($core:tt $rest:tt Write) => {
        crate::suite::cells::tests! { $core sides: grants_what_the_table_says fences }
        crate::suite::cells::tests! { $rest sides:
            excludes_beside_another_reader counts_both_sides_of_an_owner a_released_write_leaves_the_read
            has_a_deepest_level_on_each_side is_no_lock_of_another_kind
            an_inner_write_does_not_shorten_the_outer_one
        }
        crate::suite::cells::tests! { $core upgrades: upgrades_the_sole_reader }
        crate::suite::cells::tests! { $rest upgrades:
            refuses_a_second_upgrade_at_once a_cancelled_upgrade_leaves_no_mark
            upgrades_past_writers_of_the_same_client
        }
        crate::suite::cells::tests! { $core downgrades: downgrades_without_an_instant_between }
        crate::suite::cells::tests! { $rest downgrades:
            renews_what_was_downgraded downgrades_one_hold_of_several downgrades_over_faults
            a_downgrade_shortens_no_other_hold
            a_late_downgrade_is_not_trusted_for_longer_than_the_server_keeps_it
        }
        crate::suite::cells::tests! { $rest readers:
            a_dead_reader_ends_by_himself ttls_do_not_touch_each_other a_waiting_writers_mark_ends_with_him
            is_taken_away_by_force_on_either_side shows_both_sides refuses_more_readers_than_allowed
        }
        crate::suite::cells::tests! { $rest fairness:
            lets_in_one_writer_among_readers lets_in_one_reader_among_writers shares_among_both_sides
            serves_everybody_of_one_client
        }
    };
    ($core:tt $rest:tt $kind:ident) => {};
}

macro_rules! tests {
    ($attributes:tt $module:ident: $($behaviour:ident)+) => {
        $(crate::suite::cells::test! { $attributes $module $behaviour })+
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

/// `all`: every behaviour, whenever there are tests. `wide`: those that hold for all kinds, and the
/// core of those of owners. `core`: the core of all. `full`: only with all tests.
macro_rules! matrix {
    (all; $($cells:tt)+) => { crate::suite::cells::matrix! { [] [] [] $($cells)+ } };
    (wide; $($cells:tt)+) => {
        crate::suite::cells::matrix! { [] [] [#[ignore = "takes long: scripts/test --full"]] $($cells)+ }
    };
    (core; $($cells:tt)+) => {
        crate::suite::cells::matrix! {
            [] [#[ignore = "takes long: scripts/test --full"]] [#[ignore = "takes long: scripts/test --full"]]
            $($cells)+
        }
    };
    (full; $($cells:tt)+) => {
        crate::suite::cells::matrix! {
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

            crate::suite::cells::all! { $core $rest }
            crate::suite::cells::alone! { $core $rest $kind }
            crate::suite::cells::owners! { $core $owners $kind }
        })+
    };
}

pub(crate) use {all, alone, matrix, owners, test, tests};
